# SPDX-License-Identifier: MIT OR Apache-2.0
"""A baton that threads hand over, so that exactly one of them runs and a seed gives the order.

What it is for: the head, the workers and a model's collectives run in one process without Ray, without sockets and
without sleeping; whoever would block gives the baton away, and a seeded choice says who goes on. Time is virtual: it
moves only when everybody waits, to the nearest deadline. When everybody waits and nobody has a deadline, every
thread gets `Deadlock`.

What it leaves out: real parallelism. It is for tests, simulation and replay.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Deadlock(RuntimeError):
    """Every thread waits for something that no other thread will do."""


@dataclass
class _Member:
    name: str
    turn: threading.Event = field(default_factory=threading.Event)
    ready: Callable[[], bool] | None = None  # None: may run
    deadline: float | None = None
    what: str = ""
    finished: bool = False


class Baton:
    """Runs named functions as threads of which exactly one runs at a time."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0  # virtual seconds
        self._random = random.Random(seed)
        self._members: dict[int, _Member] = {}
        self._broken: str | None = None

    def run(self, tasks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run every task to its end; give each one's result, or the exception it raised, by name."""
        results: dict[str, Any] = {}
        members = [_Member(name) for name in tasks]
        threads = [
            threading.Thread(target=self._live, args=(member, tasks[member.name], results), name=member.name)
            for member in members
        ]
        for thread in threads:
            thread.start()
        while len(self._members) < len(members):  # each registers before it waits for its first turn
            threading.Event().wait(0.0005)
        self._pass_on()
        for thread in threads:
            thread.join()
        self._members.clear()
        return results

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None = None, what: str = "") -> bool:
        """Give the baton away until `ready()` holds (True) or `timeout_s` of virtual time have passed (False).

        `what` names the wait in a Deadlock. Only the task that holds the baton may call this.
        """
        me = self._members[threading.get_ident()]
        me.ready, me.what = ready, what
        me.deadline = None if timeout_s is None else self.now + timeout_s
        me.turn.clear()
        self._pass_on()
        me.turn.wait()
        me.ready = None
        if self._broken is not None:
            raise Deadlock(self._broken)
        return ready()

    def _live(self, me: _Member, task: Callable[[], Any], results: dict[str, Any]) -> None:
        self._members[threading.get_ident()] = me
        me.turn.wait()
        try:
            results[me.name] = task()
        except BaseException as error:  # noqa: BLE001  handed to the caller of run(), whatever it is
            results[me.name] = error
        me.finished = True
        self._pass_on()

    def _pass_on(self) -> None:
        waiting = [m for m in self._members.values() if not m.finished]
        if not waiting:
            return
        runnable = [m for m in waiting if self._broken is not None or m.ready is None or m.ready()]
        if not runnable:
            runnable = self._expire(waiting)
        self._random.choice(runnable).turn.set()

    def _expire(self, waiting: list[_Member]) -> list[_Member]:
        deadlines = [m.deadline for m in waiting if m.deadline is not None]
        if not deadlines:
            self._broken = "everybody waits: " + "; ".join(f"{m.name} for {m.what or 'something'}" for m in waiting)
            return waiting
        self.now = max(self.now, min(deadlines))
        return [m for m in waiting if m.deadline is not None and m.deadline <= self.now]
