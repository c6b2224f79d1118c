# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Sample`: what was seen of one request. Times are seconds of one clock that only goes forward."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

MAX_MESSAGE_CHARACTERS = 300


@dataclass(slots=True)
class Sample:
    """One request.

    `sent_s`: when it was sent; `late_s`: how much later than it was due. `first_s`, `last_s`: when the first and the
    last piece with output arrived, None without one; `gaps_s`: the times between pieces. Pieces that arrive in one read
    have the same time. `num_input`, `num_output`: tokens as the server counts them, None where it did not say.
    `error`: a code, None when all is well; `ended_s` None: it did not end, since the run was cut short.
    """

    sent_s: float
    late_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    num_pieces: int = 0
    num_input: int | None = None
    num_output: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""

    @property
    def has_succeeded(self) -> bool:
        """Whether a whole answer came."""
        return self.ended_s is not None and self.error is None

    def note_piece(self, now_s: float) -> None:
        """A piece with output has arrived."""
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.num_pieces += 1

    def fail(self, code: str, message: str) -> None:
        """It has failed. The first failure is the one that counts."""
        if self.error is None:
            self.error, self.message = code, " ".join(message.split())[:MAX_MESSAGE_CHARACTERS]
