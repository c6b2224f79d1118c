# SPDX-License-Identifier: MIT OR Apache-2.0
"""A baton that threads hand over, so that exactly one of them runs and a seed gives the order.

What it is for: the head, the workers and a model's collectives run in one process without Ray, without sockets and
without sleeping; whoever would block gives the baton away, and a seeded choice says who goes on. Time is virtual: it
moves only when everybody waits, to the nearest deadline. When everybody waits and nobody has a deadline, every
thread gets `Deadlock`.

Rules: `ready` functions only look, as anyone may call them at any time. The same tasks under the same seed run in the
same order, if they take time and chance from here or from arguments. One task's exception ends that task alone.

What it leaves out: real parallelism. It is for tests, simulation and replay. A task that never waits, or waits only for
what already holds, keeps virtual time where it is.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Deadlock(RuntimeError):
    """Every task waits for something that no other task will do."""


@dataclass
class _Member:
    name: str
    turn: threading.Event = field(default_factory=threading.Event)
    ready: Callable[[], bool] | None = None  # None: may run
    deadline: float | None = None
    what: str = ""
    finished: bool = False

    def may_run(self, now: float) -> bool:
        """Whether there is something to wake for: what it waits for, its deadline, or its own error."""
        if self.ready is None or (self.deadline is not None and self.deadline <= now):
            return True
        try:
            return self.ready()
        except Exception:  # noqa: BLE001  its owner calls it again when it wakes, and gets the error there
            return True


class Baton:
    """Runs named functions as threads of which exactly one runs at a time. `now` is in virtual seconds."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self._random = random.Random(seed)
        self._members: list[_Member] = []
        self._here = threading.local()  # .member: the task that this thread is
        self._broken: str | None = None

    def run(self, tasks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run every task to its end; give each one's result, or the exception it raised, by name.

        May be called again when it has returned; virtual time and the seed's choices then go on from there.
        """
        if self._members:
            raise RuntimeError("this baton is running tasks already; give every group of tasks its own Baton")
        results: dict[str, Any] = {}
        # In the order given, not in the order in which threads come up: the seed chooses among positions.
        self._members = [_Member(name) for name in tasks]
        self._broken = None
        # Daemons, so that an interrupted caller can exit while tasks wait for their turn.
        threads = [
            threading.Thread(target=self._live, args=(m, tasks[m.name], results), name=m.name, daemon=True)
            for m in self._members
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        self._members = []
        return {name: results[name] for name in tasks}

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None = None, what: str = "") -> bool:
        """Give the baton away until `ready()` holds (True) or `timeout_s` of virtual time have passed (False).

        The baton is given away even if `ready()` holds already. `what` names the wait in a Deadlock. Raises Deadlock
        when everybody waits without a deadline, and what `ready` raises. Only the task that holds the baton may call
        this.
        """
        me: _Member | None = getattr(self._here, "member", None)
        if me is None:
            raise RuntimeError("wait_until was called outside of this baton's tasks; call it from a task of run()")
        me.ready, me.what = ready, what
        me.deadline = None if timeout_s is None else self.now + timeout_s
        me.turn.clear()
        self._pass_on()
        me.turn.wait()
        me.ready = me.deadline = None
        if self._broken is not None:
            raise Deadlock(self._broken)
        return ready()

    def _live(self, me: _Member, task: Callable[[], Any], results: dict[str, Any]) -> None:
        self._here.member = me
        me.turn.wait()
        try:
            results[me.name] = task()
        except BaseException as error:  # noqa: BLE001  handed to the caller of run(), whatever it is
            results[me.name] = error
        me.finished = True
        self._pass_on()

    def _pass_on(self) -> None:
        waiting = [m for m in self._members if not m.finished]
        if waiting:
            self._random.choice(self._runnable(waiting)).turn.set()

    def _runnable(self, waiting: list[_Member]) -> list[_Member]:
        if self._broken is not None:
            return waiting
        runnable = [m for m in waiting if m.may_run(self.now)]
        return runnable or self._expire(waiting)

    def _expire(self, waiting: list[_Member]) -> list[_Member]:
        """Everybody waits: move to the nearest deadline, or call it a deadlock."""
        deadlines = [m.deadline for m in waiting if m.deadline is not None]
        if not deadlines:
            self._broken = "everybody waits: " + "; ".join(f"{m.name} for {m.what or 'something'}" for m in waiting)
            return waiting
        self.now = min(deadlines)
        return [m for m in waiting if m.may_run(self.now)]
