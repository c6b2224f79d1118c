# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Counters`: what an engine has done since its start, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    by_failure: dict[str, int] = field(default_factory=dict)
    command: str | None = None  # the one that is under way
    completed_at_s: float = 0.0  # when the last one was judged (monotonic clock)
