# SPDX-License-Identifier: MIT OR Apache-2.0
"""What waits and times stand on: a clock and a condition, which come from outside.

The real ones are `time.monotonic` and `threading.Condition`; others run a whole group of ranks in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

Clock = Callable[[], float]
"""Monotonic seconds."""


class Condition(Protocol):
    """What is used of `threading.Condition`."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> object: ...

    def notify_all(self) -> None:
        """Let all who wait look again."""
        ...

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """Wait until `predicate` holds, or for `timeout` seconds; its last value."""
        ...


NewCondition = Callable[[], Condition]
