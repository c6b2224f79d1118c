# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a front gives its user: texts, tokens and why they ended. Shapes and names are vLLM's, so its scripts work."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely one token was at one place, before temperature, penalties and every other parameter.

    `logprob` is a natural logarithm and always finite. `rank` counts from 1, the most likely token. `decoded_token` is
    the token's text by itself (special tokens included), and None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One answer so far. `delta` is the text that is new since the last item of a stream.

    `finish_reason`: None while it runs, then "stop", "length", "abort" or "error". `stop_reason`: the stop string or
    the stop token id that ended it. `error`: the failure's text, with finish reason "error"; `error_code` its code.
    `logprobs`: one entry for each of `token_ids`, with the token itself and the most likely ones, by token id;
    `cumulative_logprob`: the sum over the tokens themselves. Both are None where logprobs were not asked for.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delta: str = ""
    error: str | None = None
    error_code: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The n answers to one prompt so far. `prompt` is None when token ids were given.

    `finished`: all answers have ended. `prompt_logprobs`: one entry for each token of the prompt, None for the first;
    None where they were not asked for, and until all of them are there, which is with the first token at the latest.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
