# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Delta`: what is new of the answers to one prompt since its reader last looked.

Rules: nothing here grows with the answer. A sequence is in a delta only when it has news.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from metrale_ray.serve.outputs import Logprob


@dataclass(slots=True)
class SequenceDelta:
    """What is new of one answer.

    `texts`: for each of `token_ids` the text that it made certain, "" while nothing is; behind them, at the end, what
    was held back. `logprobs`: one entry for each of `token_ids`, and `offsets` the characters of text before each;
    both are empty where logprobs were not asked for. The rest is as in `CompletionOutput`.
    """

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None

    @property
    def text(self) -> str:
        """All of the new text."""
        return "".join(self.texts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is new."""
        return not self.token_ids and self.finish_reason is None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of the n answers to one prompt. `finished`: all of them have ended.

    `prompt_logprobs`: as in `RequestOutput`, in the first delta of a request that asks for them; None in all others.
    """

    sequences: list[SequenceDelta]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
