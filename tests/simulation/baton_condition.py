# SPDX-License-Identifier: MIT OR Apache-2.0
"""`BatonCondition`: what `threading.Condition` is to threads, for tasks of a baton.

Rules: entering is a hand-over, as a thread may be interrupted wherever it takes a lock. A wait ends when somebody
notified, not when the predicate happens to hold, so that a forgotten notification shows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from metrale_ray.baton import Baton, Task


class BatonCondition:
    """A lock that its owner may take again, with waits. See `clock.Condition`."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._owner: Task | None = None
        self._depth = 0
        self._num_notified = 0

    def __enter__(self) -> BatonCondition:
        me = self._baton.task
        if self._owner is not me:
            self._baton.wait_until(self._is_free, what="a lock")
            self._owner = me
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None

    def notify_all(self) -> None:
        """See Condition."""
        self._check_owner("notify_all")
        self._num_notified += 1

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> object:
        """See Condition. Seconds are virtual."""
        self._check_owner("wait_for")
        baton = self._baton
        deadline = None if timeout is None else baton.now + timeout
        result = predicate()
        while not result and (deadline is None or deadline > baton.now):
            self._wait(None if deadline is None else deadline - baton.now)
            result = predicate()
        return result

    def _wait(self, timeout_s: float | None) -> None:
        owner, depth, seen = self._owner, self._depth, self._num_notified
        self._owner, self._depth = None, 0
        try:
            self._baton.wait_until(lambda: self._num_notified != seen, timeout_s, "a notification")
            if self._owner is not None:
                self._baton.wait_until(self._is_free, what="a lock")
        finally:
            self._owner, self._depth = owner, depth

    def _is_free(self) -> bool:
        return self._owner is None

    def _check_owner(self, what: str) -> None:
        if self._owner is not self._baton.task:
            raise RuntimeError(f"{what} was called by a task that has not entered the condition")
