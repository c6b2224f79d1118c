# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a front gives its user: text, tokens and why they ended. Shapes and names are vLLM's, so its scripts work."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CompletionOutput:
    """One answer so far. `delta` is the text that is new since the last item of a stream.

    `finish_reason`: None while it runs, then "stop", "length", "abort" or "error". `stop_reason`: the stop string or
    the stop token id that ended it. `error`: the failure's text, with finish reason "error"; `error_code` its code.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delta: str = ""
    error: str | None = None
    error_code: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answer so far. `prompt` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
