# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Counters`: what an engine has done since its start, as plain numbers.

The engine's thread writes and any thread reads, so whoever reads a dict copies it first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from metrale_ray.protocol.commands import Cmd, Timing


@dataclass(slots=True)
class CommandCounters:
    """One kind of command: how many ended how, and the head's seconds in each phase, all commands together.

    `by_status`: ok, rejected, failed and poisoned as verdicts say; lost and desync end the engine. `plan_s`: deciding
    what to run; `send_s`: its frame, made and sent; `run_s`: rank 0's own part, of which it waited `reduce_s` in sums;
    `reply_s`: waiting for the other ranks after that, and judging; `sample_s`: from logits to tokens; `deliver_s`:
    noting the tokens and handing them on.
    """

    by_status: dict[str, int] = field(default_factory=dict)
    plan_s: float = 0.0
    send_s: float = 0.0
    run_s: float = 0.0
    reduce_s: float = 0.0
    reply_s: float = 0.0
    sample_s: float = 0.0
    deliver_s: float = 0.0

    def count(self, status: str) -> None:
        """One more ended so."""
        self.by_status[status] = self.by_status.get(status, 0) + 1

    def document(self) -> dict[str, Any]:
        """All of it as plain numbers. From any thread."""
        seconds = {name: getattr(self, name) for name in self.__slots__ if name != "by_status"}
        return {"by_status": dict(self.by_status), **seconds}


@dataclass(slots=True)
class RankCounters:
    """One rank's part in all commands.

    `lag_s`: from rank 0's own end to the moment when this rank's reply was read; replies are read in the order of the
    ranks, so a rank's lag is at least that of the ranks before it. `computed_s`, `waited_s`: what the rank itself says
    of its time, outside and inside sums.
    """

    replies: int = 0
    last_lag_s: float = 0.0
    lag_s: float = 0.0
    max_lag_s: float = 0.0
    computed_s: float = 0.0
    waited_s: float = 0.0

    def note(self, lag_s: float, timing: Timing) -> None:
        """One more reply."""
        self.replies += 1
        self.last_lag_s = lag_s
        self.lag_s += lag_s
        if lag_s > self.max_lag_s:
            self.max_lag_s = lag_s
        self.computed_s += timing.computed_us * 1e-6
        self.waited_s += timing.waited_us * 1e-6


def _of_each_code() -> list[CommandCounters]:
    return [CommandCounters() for _ in range(max(Cmd) + 1)]


@dataclass(slots=True)
class Counters:
    """Counts since start. Steps are commands with rows that succeeded. Requests that expired have failed too."""

    commands: int = 0
    steps: int = 0
    tokens: int = 0
    failed_commands: int = 0
    failed_requests: int = 0
    expired_requests: int = 0
    finished_requests: int = 0
    digest_mismatches: int = 0
    by_failure: dict[str, int] = field(default_factory=dict)
    by_refusal: dict[str, int] = field(default_factory=dict)  # requests that were not taken, by the error's code
    by_code: list[CommandCounters] = field(default_factory=_of_each_code)  # commands, by the code's number
    by_rank: list[RankCounters] = field(default_factory=list)
    command: Cmd | None = None  # the one that is under way
    completed_at_s: float = 0.0  # when the last one was judged (monotonic clock)

    def of_command(self, code: Cmd) -> CommandCounters:
        """The counters of this kind of command."""
        return self.by_code[code]

    def refused(self, code: str) -> None:
        """A request was not taken."""
        self.by_refusal[code] = self.by_refusal.get(code, 0) + 1
