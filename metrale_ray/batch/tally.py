# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Tally`: how far a batch is; and `BatchSummary`, what is told of it in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """`num_requests`: lines of INPUT. `num_errors`: those that OUTPUT has as errors, of earlier runs too.

    `num_before`: those that OUTPUT had before this run. Tokens and seconds are of this run.
    """

    num_requests: int
    num_before: int
    num_errors: int
    num_prompt_tokens: int
    num_tokens: int
    seconds: float

    def __str__(self) -> str:
        before = f" ({self.num_before} of them before)" if self.num_before else ""
        rate = f", {self.num_tokens / self.seconds:.1f} tokens/s" if self.num_tokens and self.seconds > 0 else ""
        return (
            f"{self.num_requests} requests{before}, {self.num_errors} errors; {self.num_prompt_tokens} tokens in, "
            f"{self.num_tokens} out in {self.seconds:.1f} s{rate}"
        )


class Tally:
    """Counts so far. It is a `Meter` of all requests together: `num_seen_tokens` grows while they run."""

    def __init__(self, num_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = num_requests
        self.num_before = 0
        self.num_now = 0
        self.num_errors = 0
        self.num_seen_tokens = 0
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._clock = clock
        self._began_at_s = clock()

    @property
    def num_done(self) -> int:
        """Requests that OUTPUT answers."""
        return self.num_before + self.num_now

    @property
    def passed_s(self) -> float:
        """Since `begin`."""
        return self._clock() - self._began_at_s

    @property
    def left_s(self) -> float | None:
        """How long the rest takes, if it goes on as it did; None while that is not known."""
        if not self.num_now:
            return None
        return self.passed_s / self.num_now * (self.num_requests - self.num_done)

    def begin(self) -> None:
        """The first request goes out now."""
        self._began_at_s = self._clock()

    def answered(self, usage: Mapping[str, Any] | None) -> None:
        """One more request has its answer; `usage` is OpenAI's object in it, None for an error."""
        self.num_now += 1
        if usage is None:
            self.num_errors += 1
            return
        self._num_prompt_tokens += usage["prompt_tokens"]
        self._num_tokens += usage["completion_tokens"]

    def summary(self) -> BatchSummary:
        """What is told in the end."""
        return BatchSummary(
            num_requests=self.num_requests,
            num_before=self.num_before,
            num_errors=self.num_errors,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._num_tokens,
            seconds=self.passed_s,
        )

    def prompt(self, num_tokens: int) -> None:
        """Counted when the answer is there, as a request may be sent again."""

    def tokens(self, count: int) -> None:
        """So many tokens came just now."""
        self.num_seen_tokens += count

    def finished(self, reason: str) -> None:
        """Requests are counted, not sequences."""
