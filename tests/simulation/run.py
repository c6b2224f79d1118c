# SPDX-License-Identifier: MIT OR Apache-2.0
"""`run_case`: one whole run of the simulation, and everything that is wrong about it.

A life begins with its processes, its fronts ask what the workload says, and when all of them have ended an overseer
waits until the engine has nothing left to do and holds nothing; then the head is told to stop. The same seed and case
give the same run, to every turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

from metrale_ray.baton import Deadlock, Killed, Overrun
from metrale_ray.config import EngineConfig
from metrale_ray.engine import Engine
from metrale_ray.errors import EngineDead, LinkLost, MetraleError
from metrale_ray.head import FIRST_EPOCH
from metrale_ray.protocol.front import FrontServer
from metrale_ray.protocol.journal.journal import Journal
from metrale_ray.scheduler.scheduler import Scheduler
from tests.simulation.asking import asking
from tests.simulation.faults import ProcessFault, SumFault
from tests.simulation.group import Group
from tests.simulation.invariants import Got, LifeResult, violations
from tests.simulation.ledger import Ledger
from tests.simulation.life import Life, LifeUnderway
from tests.simulation.mirror import pools
from tests.simulation.oracle import Oracle
from tests.simulation.schedule import RANK_AT_FAULT, STEP_TIMEOUT_S, EngineFault, Fault, draw_schedule, is_violent
from tests.simulation.seat import Script, Seat
from tests.simulation.shrink import Case
from tests.simulation.watch import Sight, Watch, watch
from tests.simulation.workload import draw_workload

REST_S = 200.0
"""How long an engine whose fronts have gone may take to have nothing left to do, in virtual seconds: longer than any
fault lasts."""

START_TIMEOUT_S = 60.0

MAX_TURNS = 60_000
"""Twenty times as many as the longest run takes: what goes round in circles is found soon."""

AT_FAULT = ("fails whatever it is given", "again and again")
"""What the head says of a rank that it gives up by its own judgement."""


@dataclass(slots=True)
class Outcome:
    """One run: what is wrong, how each life went, what it journaled, and a trace that equal runs share."""

    violations: list[str]
    results: list[LifeResult] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)
    trace: tuple[int, int, int] = (0, 0, 0)


def draw_case(seed: int) -> Case:
    """The workload and the schedule of a seed."""
    workload = draw_workload(seed)
    return Case(workload, draw_schedule(seed, workload))


def run_case(seed: int, case: Case, folder: Path, oracle: Oracle) -> Outcome:
    """Run one case with the model in `folder`. `seed` draws the order of turns and the delays of the network."""
    with watch() as seen, mock.patch("metrale_ray.head.FrontServer", partial(FrontServer, credit=case.workload.credit)):
        return _Run(seed, case, folder, seen).run(oracle)


class _Run:
    """What the parts of one run share.

    What is left is looked at when the engine is at rest, and not at the end of its life: a front that the head was cut
    off from may still ask for something before the head stops.
    """

    def __init__(self, seed: int, case: Case, folder: Path, seen: Watch) -> None:
        self._case = case
        self._folder = folder
        self._seen = seen
        self._sights: list[Sight] = []
        self._ledgers: list[Ledger] = []
        self._results: list[LifeResult] = []
        self._group = Group(
            seed,
            self._config,
            faults=[fault for fault in case.faults if not isinstance(fault, EngineFault)],
            journal=self._begin,
            max_turns=MAX_TURNS,
        )

    def run(self, oracle: Oracle) -> Outcome:
        """All lives."""
        workload = self._case.workload
        lives = [self._scripts(number) for number in range(len(workload.lives))]
        found: list[str] = []
        try:
            self._group.run(lives)
        except (Deadlock, Overrun) as error:
            found = [f"{type(error).__name__}: {error}"]
        ended = self._group.lives
        for life in ended:
            self._conclude(life, self._results[life.number])
        results = self._results[: len(ended)]
        found += violations(replace(workload, lives=workload.lives[: len(ended)]), oracle, results)
        return Outcome(found, results, self._ledgers, self._group.trace)

    def _config(self, life: int) -> EngineConfig:
        return EngineConfig(
            model=str(self._folder),
            dtype="float32",
            device="cpu",
            num_cpus_per_rank=1,
            start_timeout_s=START_TIMEOUT_S,
            step_timeout_s=STEP_TIMEOUT_S,
            faults=tuple(fault.spec() for fault in self._engine_faults(life)),
            **self._case.workload.settings(),
        ).resolved({})

    def _engine_faults(self, life: int) -> list[EngineFault]:
        return [fault for fault in self._case.faults if isinstance(fault, EngineFault) and fault.life == life]

    def _begin(self, number: int) -> Journal:
        """The head of a life is being made."""
        sight = self._seen.begin(FIRST_EPOCH + number)
        ledger = Ledger(sight.epoch, lambda: sight.slots, self._scheduler, lambda: sight.unwanted)
        self._sights.append(sight)
        self._ledgers.append(ledger)
        return ledger

    def _scheduler(self) -> Scheduler | None:
        head = self._group.head
        engine = None if head is None else head._engine
        return None if engine is None else engine._scheduler

    # The scripts of a life -----------------------------------------------------------------------------------------

    def _scripts(self, number: int) -> list[Script]:
        life = self._case.workload.lives[number]
        got = [Got(ask) for ask in life.asks]
        self._results.append(LifeResult(number, "fine", "", got))
        gone: set[int] = set()
        scripts: list[Script] = []
        for front in range(life.num_fronts):
            leaves = [leave for leave in life.leaves if leave.front == front]
            mine = [each for each in got if each.ask.front == front]
            scripts.append(partial(_until_gone, asking(mine, leaves, self._seen.listen), gone, front))
        return [*scripts, lambda seat: self._oversee(number, seat, gone)]

    def _oversee(self, number: int, seat: Seat, gone: set[int]) -> None:
        """Wait until the fronts have ended and the engine is at rest, or has ended."""
        num_fronts = self._case.workload.lives[number].num_fronts

        life = self._life
        fronts = [life.processes[f"front {front}"] for front in range(num_fronts)]

        def are_gone() -> bool:
            if len(gone) == num_fronts:
                return True
            return bool(life.stopped_for_good) and all(
                front in gone or life.never_goes_on(process) for front, process in enumerate(fronts)
            )

        seat.baton.wait_until(are_gone, None, "the end of the other fronts")
        if not seat.baton.wait_until(self._is_at_rest, REST_S, "an engine at rest"):
            lines = self._unrest()
            self._results[number].complaints.append(f"the engine does not come to rest: {'; '.join(lines)}")

    def _is_at_rest(self) -> bool:
        """Also when it has ended, or never goes on."""
        life = self._life
        head = life.processes["head"]
        return life.has_head_ended or life.never_goes_on(head) or head.is_dead or (life.is_ready and not self._unrest())

    @property
    def _life(self) -> LifeUnderway:
        life = self._group.underway
        assert life is not None, "asked from within a life"
        return life

    def _unrest(self) -> list[str]:
        """What the engine still has to do, or holds."""
        head, scheduler = self._group.head, self._scheduler()
        if head is None or scheduler is None:
            return ["it has not started"]
        counts = {
            "requests run": scheduler.num_running,
            "requests wait": scheduler.num_waiting,
            "requests are on their way in": len(head._inbox) + len(head._inbox._endings),
            "requests are known to the engine": len(self._required_engine()._live),
            "requests have clients": len(head._desk.clients),
        }
        held = [*self._ledgers[-1].at_rest(), *pools(scheduler), *self._miscounted()]
        return [f"{number} {what}" for what, number in counts.items() if number] + held

    def _miscounted(self) -> Iterator[str]:
        engine = self._required_engine()
        for name, number in self._ledgers[-1].counted().items():
            if getattr(engine.counters, name) != number:
                yield f"the engine counts {getattr(engine.counters, name)} {name}, and there were {number}"
        sight = self._sights[-1]
        if sight.gone != sight.over:
            ended, told = sorted(sight.over.elements()), sorted(sight.gone.elements())
            yield f"the sessions {ended} ended, and the engine was told of {told}"
        if len(engine.timelines):
            yield f"{len(engine.timelines)} timelines go on"

    def _required_engine(self) -> Engine:
        head = self._group.head
        engine = None if head is None else head._engine
        assert engine is not None, "asked after the scheduler was found"
        return engine

    # How a life ended ----------------------------------------------------------------------------------------------

    def _conclude(self, life: Life, result: LifeResult) -> None:
        sight = self._sights[life.number]
        raised = tuple(fault for fault in self._engine_faults(life.number) if fault.spec() in sight.raised)
        result.fired = (*life.fired, *raised)
        result.end, result.message = _end_of(life, sight)
        result.rank = getattr(sight.failure, "rank", None)
        scheduler = None if life.head_object is None else getattr(life.head_object._engine, "_scheduler", None)
        result.num_preemptions = 0 if scheduler is None else scheduler.num_preemptions
        result.complaints += [*life.violations, *self._ledgers[life.number].complaints, *sight.complaints]
        result.complaints += _processes(life, result)


def _until_gone(script: Script, gone: set[int], front: int, seat: Seat) -> None:
    try:
        script(seat)
    finally:
        gone.add(front)


def _end_of(life: Life, sight: Sight) -> tuple[str, str]:
    """The class of a life's end, and its words."""
    if life.head is None:
        return "fine", ""
    if isinstance(life.head, Killed):
        return "killed", "the head's process was killed"
    error = life.head if sight.failure is None else sight.failure
    if isinstance(error, LinkLost) and any(words in error.message for words in AT_FAULT):
        return RANK_AT_FAULT, error.message
    return getattr(error, "code", type(error).__name__), f"{error}"


def _processes(life: Life, result: LifeResult) -> Iterator[str]:
    """How the processes ended, where that is not as it should be."""
    hurt = {name for fault in result.fired if (name := _hurt(fault)) is not None}
    if isinstance(life.head, Killed) and "head" not in hurt:
        yield "the head did not end and had to be killed"
    for rank, left in life.workers.items():
        if isinstance(left, Killed) and f"rank {rank}" not in hurt:
            yield f"rank {rank} did not end and had to be killed"
        elif left is not None and not isinstance(left, Killed | MetraleError):
            yield f"rank {rank} ended with {left!r}"
        elif left is not None and not any(map(is_violent, result.fired)):
            yield f"rank {rank} ended with {left!r}, and nothing violent happened"
    for front, left in life.fronts.items():
        if left is not None and not isinstance(left, Killed | EngineDead):
            yield f"front {front} ended with {left!r}"


def _hurt(fault: Fault) -> str | None:
    match fault:
        case ProcessFault():
            return fault.process
        case SumFault():
            return f"rank {fault.rank}" if fault.rank else "head"
        case _:
            return None
