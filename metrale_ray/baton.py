# SPDX-License-Identifier: MIT OR Apache-2.0
"""A baton that threads hand over, so that exactly one of them runs and a seed gives the order.

What it is for: the head, the workers, the fronts and a model's collectives run in one process without Ray, without
sockets and without sleeping; whoever would block gives the baton away, and a seeded choice says who goes on. Time is
virtual: it moves only when everybody waits, to the nearest deadline or timer. When everybody waits and there is none,
every thread gets `Deadlock`.

Tasks may belong to a `Process`, which stands for one of the operating system: it is stopped, resumed or killed at any
hand-over. The tasks of a stopped one get no turn; those of a dead one get `Killed` at every wait.

Rules: `ready` functions only look, as anyone may call them at any time. The same tasks under the same seed run in the
same order, if they take time and chance from here or from arguments. One task's exception ends that task alone. What a
task of a dead process does to the world beside it must have no effect; the parts of that world see to it.

What it leaves out: real parallelism. It is for tests, simulation and replay. A task that never waits, or waits only for
what already holds, keeps virtual time where it is.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any


class Deadlock(RuntimeError):
    """Every task waits for something that no other task will do."""


class Overrun(RuntimeError):
    """The tasks took more turns, or more virtual time, than they may."""


class Killed(BaseException):
    """This task's process is dead: whatever it still does has no effect."""


class Process:
    """Tasks that are stopped, resumed and killed together: a process of the operating system. It begins with none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.at_change: list[Callable[[], None]] = []
        """Called after each change of the two above; they may not wait."""

    def stop(self) -> None:
        """Give its tasks no turn until `resume`. What is due meanwhile is late."""
        self._change(is_dead=self.is_dead, is_stopped=True)

    def resume(self) -> None:
        """Let its tasks go on."""
        self._change(is_dead=self.is_dead, is_stopped=False)

    def kill(self) -> None:
        """Every wait of its tasks raises Killed from now on, the ones that they are in too. Also of a stopped one."""
        self._change(is_dead=True, is_stopped=False)

    def _change(self, *, is_dead: bool, is_stopped: bool) -> None:
        is_stopped = is_stopped and not is_dead
        if (is_dead, is_stopped) != (self.is_dead, self.is_stopped):
            self.is_dead, self.is_stopped = is_dead, is_stopped
            for tell in tuple(self.at_change):
                tell()


class Task:
    """One function in a thread of its own. Made by `Baton.start`; `result` is what it gave or raised, once it ended."""

    def __init__(self, name: str, process: Process | None) -> None:
        self.name = name
        self.process = process
        self.result: Any = None
        self.has_ended = False
        # The baton's own; a raw lock that is held while it is not this task's turn is the fastest way to wait.
        self._turn = threading.Lock()
        self._turn.acquire()
        self._ready: Callable[[], bool] | None = None  # None: may run
        self._deadline: float | None = None
        self._what = ""
        self._mark = name.encode()

    @property
    def is_killed(self) -> bool:
        """Whether its process is dead."""
        return self.process is not None and self.process.is_dead

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped."""
        return self.process is not None and self.process.is_stopped

    def may_run(self, now: float) -> bool:
        """Whether there is something to wake for: what it waits for, its deadline, its own error, or its death."""
        if self.process is not None and (self.process.is_dead or self.process.is_stopped):
            return self.process.is_dead
        if self._ready is None or (self._deadline is not None and self._deadline <= now):
            return True
        try:
            return self._ready()
        except Exception:  # noqa: BLE001  its owner calls it again when it wakes, and gets the error there
            return True


class Baton:
    """Runs named functions as threads of which exactly one runs at a time. `now` is in virtual seconds.

    `max_turns`, `max_s`: how many hand-overs and how much virtual time there may be in all; beyond, every wait raises
    Overrun. `turns` counts the hand-overs so far, and `history` is a number made of who got each of them and when: two
    runs with the same one went the same way.
    """

    def __init__(self, seed: int = 0, *, max_turns: int | None = None, max_s: float | None = None) -> None:
        self.now = 0.0
        self.turns = 0
        self.history = 0
        self.at_turn: Callable[[], None] | None = None
        """Called before each hand-over, by whoever gives the baton away. It may not wait; what it raises ends all."""
        self._max_turns = max_turns
        self._max_s = max_s
        self._random = random.Random(seed)
        self._tasks: list[Task] = []  # that have not ended
        self._threads: list[threading.Thread] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._here = threading.local()  # .task: the task that this thread is
        self._broken: RuntimeError | None = None
        self._failure: Exception | None = None  # of a hook or a timer

    def run(self, tasks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run every task to its end, those that are started meanwhile too; give each one's result, or the exception it
        raised, by name. Raises what a hook or a timer raised.

        May be called again when it has returned; virtual time and the seed's choices then go on from there.
        """
        if self._threads:
            raise RuntimeError("this baton is running tasks already; give every group of tasks its own Baton")
        self._broken = self._failure = None
        # In the order given, not in the order in which threads come up: the seed chooses among positions.
        mine = {name: self._add(name, task, None) for name, task in tasks.items()}
        self._pass_on()
        for thread in self._threads:  # which grows
            thread.join()
        self._threads = []
        if self._failure is not None:
            raise self._failure
        return {name: task.result for name, task in mine.items()}

    def start(self, name: str, task: Callable[[], Any], process: Process | None = None) -> Task:
        """Run one more task beside those of `run`, which must be under way. It gets its first turn some time later."""
        if not self._threads:
            raise RuntimeError("this baton runs no tasks; give the first ones to run()")
        return self._add(name, task, process)

    def call_at(self, when_s: float, act: Callable[[], None]) -> None:
        """Call `act` once virtual time has come to `when_s`. It may not wait, and belongs to no process."""
        heapq.heappush(self._timers, (max(when_s, self.now), next(self._numbers), act))

    def call_in(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call `act` after `delay_s`; see `call_at`."""
        self.call_at(self.now + delay_s, act)

    @property
    def num_tasks(self) -> int:
        """Those that have not ended."""
        return len(self._tasks)

    @property
    def task(self) -> Task:
        """The one that this thread is. Raises RuntimeError outside of this baton's tasks."""
        task: Task | None = getattr(self._here, "task", None)
        if task is None:
            raise RuntimeError("wait_until was called outside of this baton's tasks; call it from a task of run()")
        return task

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None = None, what: str = "") -> bool:
        """Give the baton away until `ready()` holds (True) or `timeout_s` of virtual time have passed (False).

        The baton is given away even if `ready()` holds already. `what` names the wait in a Deadlock. Raises Deadlock
        when everybody waits without a deadline, Overrun, Killed, and what `ready` raises. Only the task that holds the
        baton may call this.
        """
        me = self.task
        me._ready, me._what = ready, what
        me._deadline = None if timeout_s is None else self.now + timeout_s
        following = self._choose()
        if following is not me:
            if following is not None:
                following._turn.release()
            me._turn.acquire()
        me._ready = me._deadline = None
        self._check(me)
        return ready()

    def hand_over(self) -> None:
        """Let the others go first, perhaps: a point at which a process may be stopped or killed. Raises as a wait."""
        self.wait_until(_always)

    def _check(self, task: Task) -> None:
        if task.is_killed:
            raise Killed(f"{task.name} is killed")
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))  # a new one: raising changes its traceback

    def _add(self, name: str, work: Callable[[], Any], process: Process | None) -> Task:
        task = Task(name, process)
        self._tasks.append(task)
        # Daemons, so that an interrupted caller can exit while tasks wait for their turn.
        thread = threading.Thread(target=self._live, args=(task, work), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return task

    def _live(self, me: Task, work: Callable[[], Any]) -> None:
        self._here.task = me
        me._turn.acquire()
        try:
            if me.is_killed:
                raise Killed(f"{me.name} is killed")
            me.result = work()
        except BaseException as error:  # noqa: BLE001  handed to the caller of run(), whatever it is
            me.result = error
        me.has_ended = True
        self._tasks.remove(me)
        self._pass_on()

    def _pass_on(self) -> None:
        following = self._choose()
        if following is not None:
            following._turn.release()

    def _choose(self) -> Task | None:
        """Who goes on; None when all have ended."""
        self.turns += 1
        if self._broken is None and self._max_turns is not None and self.turns > self._max_turns:
            self._broken = Overrun(f"more than {self._max_turns} turns were taken by {self.now:g} s; {self._waits()}")
        self._call(self.at_turn)
        if not self._tasks:
            return None
        task = self._random.choice(self._runnable())
        self.history = zlib.crc32(b"%d %s" % (int(self.now * 1e9), task._mark), self.history)
        return task

    def _runnable(self) -> list[Task]:
        """At least one."""
        self._ring()
        while self._broken is None:
            now = self.now
            runnable = [task for task in self._tasks if task.may_run(now)]
            if runnable:
                return runnable
            self._expire()
        return self._tasks

    def _expire(self) -> None:
        """Everybody waits: move to the nearest deadline or timer, or call it a deadlock."""
        times = [task._deadline for task in self._tasks if task._deadline is not None and not task.is_stopped]
        if self._timers:
            times.append(self._timers[0][0])
        if not times:
            self._broken = Deadlock(f"everybody waits: {self._waits()}")
        elif self._max_s is not None and min(times) > self._max_s:
            self._broken = Overrun(f"more than {self._max_s:g} s passed; {self._waits()}")
        else:
            self.now = min(times)
            self._ring()

    def _ring(self) -> None:
        while self._timers and self._timers[0][0] <= self.now and self._failure is None:
            self._call(heapq.heappop(self._timers)[2])

    def _call(self, act: Callable[[], None] | None) -> None:
        if act is None or self._failure is not None:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001  the caller of run() gets it, once all tasks have left
            self._failure = error
            self._broken = RuntimeError(f"a hook or a timer failed: {type(error).__name__}: {error}")

    def _waits(self) -> str:
        return "; ".join(
            f"{task.name} {'is stopped' if task.is_stopped else 'for ' + (task._what or 'something')}"
            for task in self._tasks
        )


def _always() -> bool:
    return True
