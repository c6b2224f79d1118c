# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Group`: a whole group of ranks with its fronts in one process, under one seed, in virtual time.

`Head`, `Worker` and `FrontClient` are the real ones. What stands in for the rest: a `Network` for sockets, a `Meeting`
for the sums, a `BatonLoop` for the head's event loop, and the conductor of this file for Ray, which starts processes,
tells each what it must know, and ends those that are left.

Rules: the same arguments give the same run, to every turn and frame (`trace`). A life begins with a new head and new
workers under a higher epoch; the network goes on, so that what an earlier life sent may still come.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from metrale_ray.baton import Baton, Process, Task
from metrale_ray.config import EngineConfig
from metrale_ray.errors import LinkLost
from metrale_ray.head import FIRST_EPOCH, Head
from metrale_ray.model.device import use_threads
from metrale_ray.protocol.journal.journal import Journal, NoJournal
from metrale_ray.protocol.journal.records import Record
from metrale_ray.protocol.keys import KeyPair
from metrale_ray.protocol.link import WorkerLink
from metrale_ray.worker import Worker
from tests.simulation.baton_loop import BatonLoop
from tests.simulation.faults import Fault, ProcessFault
from tests.simulation.life import Life, LifeUnderway
from tests.simulation.meeting import Meeting
from tests.simulation.network import Network, Weather
from tests.simulation.seat import Script, Seat
from tests.simulation.sim_surroundings import SimSurroundings, drawn_keys, joined
from tests.simulation.transports import LINK_HEARTBEAT, SimTransport

HOST = "10.0.0.1"
MAX_TURNS = 400_000
MAX_S = 3600.0

END_S = 30.0
"""How long a process that should end may take beyond the longest wait of the engine; then it is killed, as Ray does."""


class Group:
    """Runs lives of a group of `config.ep_size` ranks. One call of `run` uses it up.

    `config`, for all lives or by a life's number, is resolved, and gives `kv_cache_memory`. `journal` makes the journal
    of each life's head from its number; nothing that a dead head notes reaches it. `at_turn` is called before each
    hand-over.
    """

    def __init__(
        self,
        seed: int,
        config: EngineConfig | Callable[[int], EngineConfig],
        *,
        faults: Iterable[Fault] = (),
        journal: Callable[[int], Journal] | None = None,
        at_turn: Callable[[Group], None] | None = None,
        weather: Weather | None = None,
        max_turns: int = MAX_TURNS,
        max_s: float = MAX_S,
    ) -> None:
        self.baton = Baton(seed, max_turns=max_turns, max_s=max_s)
        self.network = Network(self.baton, seed, weather)
        self.lives: list[Life] = []
        self.underway: LifeUnderway | None = None
        self._config = config
        self._faults = tuple(faults)
        self._journal = journal
        self._at_turn = at_turn
        self._chance = random.Random(f"group {seed}")
        self._due: list[ProcessFault] = []  # at turns of this life, the next one last

    @property
    def head(self) -> Head | None:
        """The head of the life that is under way, once it has been made."""
        return None if self.underway is None else self.underway.head

    @property
    def trace(self) -> tuple[int, int, int]:
        """Equal for runs that went the same way: the turns, who got each of them when, and every frame."""
        return self.baton.turns, self.baton.history, self.network.trace

    def run(self, lives: Sequence[Sequence[Script]]) -> list[Life]:
        """One life after the other, each with these scripts as its fronts. Raises what `at_turn` raised, Deadlock and
        Overrun."""
        self.baton.at_turn = self._note_turn
        result = self.baton.run({"conductor": lambda: self._conduct(lives)})["conductor"]
        if isinstance(result, BaseException):
            raise result
        return self.lives

    def _conduct(self, lives: Sequence[Sequence[Script]]) -> None:
        for number, scripts in enumerate(lives):
            self._live(number, scripts)

    def _live(self, number: int, scripts: Sequence[Script]) -> None:
        life = self.underway = self._begin(number)
        config = life.config
        names = ["head", *(f"rank {rank}" for rank in range(1, config.ep_size))]
        names += [f"front {index}" for index in range(len(scripts))]
        life.processes = {name: Process(name) for name in names}
        self._plan_process_faults(life)
        worker_keys = {rank: drawn_keys(self._chance) for rank in range(1, config.ep_size)}
        front_keys = [drawn_keys(self._chance) for _ in scripts]
        head_process = life.processes["head"]
        start = self.baton.start
        life.head_task = start("head", lambda: self._run_head(life, worker_keys, front_keys), head_process)
        workers = {
            rank: start(f"rank {rank}", partial(self._run_worker, life, rank, keys), life.processes[f"rank {rank}"])
            for rank, keys in worker_keys.items()
        }
        fronts = [
            start(f"front {index}", partial(_run_front, script, life, index, keys), life.processes[f"front {index}"])
            for index, (script, keys) in enumerate(zip(scripts, front_keys, strict=True))
        ]
        self._wait_ended(life, fronts, None)
        patience_s = END_S + max(config.step_timeout_s, config.start_timeout_s)
        self._stop_head(life, patience_s)
        self._wait_ended(life, [life.head_task], patience_s)
        self._wait_ended(life, [*workers.values()], patience_s)
        self._clear(life)
        self._keep(life, workers, fronts)

    def _begin(self, number: int) -> LifeUnderway:
        config = self._config if isinstance(self._config, EngineConfig) else self._config(number)
        faults = [fault for fault in self._faults if fault.life == number]
        self.network.begin_life(number, faults)
        chance = random.Random(self._chance.getrandbits(64))
        meeting = Meeting(self.baton, self.network, config.ep_size, chance, faults)
        now, turns = self.baton.now, self.baton.turns
        return LifeUnderway(number, FIRST_EPOCH + number, config, self.baton, self.network, meeting, now, turns)

    def _run_head(self, life: LifeUnderway, worker_keys: Mapping[int, KeyPair], front_keys: Sequence[KeyPair]) -> None:
        loop = life.loop = BatonLoop(self.baton)
        journal = NoJournal() if self._journal is None else self._journal(life.number)
        process = life.processes["head"]
        around = SimSurroundings(
            self.baton, self.network, process, life.meeting, life.number, self._chance, journal, life.incidents
        )
        head = Head(life.config, HOST, around, life.epoch)

        async def main() -> None:
            addresses = await head.listen({rank: keys.public for rank, keys in worker_keys.items()})
            for keys in front_keys:
                head.allow_front(keys.public)
            life.head, life.head_key, life.addresses = head, head.public_key, addresses
            await head.serve()

        loop.run(main())

    def _run_worker(self, life: LifeUnderway, rank: int, keys: KeyPair) -> None:
        baton, process = self.baton, life.processes[f"rank {rank}"]
        baton.wait_until(lambda: rank in life.addresses or life.has_head_ended, None, "the head's address")
        if rank not in life.addresses:
            raise LinkLost("the head ended before it had an address", rank=0)
        address = life.addresses[rank]
        end = self.network.connect(process, address.link, "the head", keys.public, address.head_key, LINK_HEARTBEAT)

        def join(setup: Any, link: WorkerLink) -> Any:
            return joined(life.meeting, process, setup, partial(_check_head, link))

        def keep(config: EngineConfig, rank: int, records: Sequence[Record]) -> None:
            if not process.is_dead:
                life.incidents.append(records)

        use_threads(life.config.threads_per_rank)  # as Worker.run does
        worker = Worker(life.config, rank, HOST, lambda: baton.now, keep, process.name)
        worker.serve(SimTransport(baton, "the head", end), join)

    def _stop_head(self, life: LifeUnderway, patience_s: float) -> None:
        """As whoever started the engine does, when nobody needs it any more."""
        process = life.processes["head"]
        self.baton.wait_until(
            lambda: life.head is not None or life.has_head_ended or life.never_goes_on(process),
            patience_s,
            "a head to stop",
        )
        head, loop = life.head, life.loop
        if head is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(head.stop(), loop=loop))

    def _wait_ended(self, life: LifeUnderway, tasks: Sequence[Task], patience_s: float | None) -> None:
        """Those that are stopped for good are not waited for."""
        self.baton.wait_until(
            lambda: all(task.has_ended or life.never_goes_on(task.process) for task in tasks),
            patience_s,
            "the end of a life",
        )

    def _clear(self, life: LifeUnderway) -> None:
        """Kill what is left of every process, and let it leave."""
        for process in life.processes.values():
            process.kill()
        self.baton.wait_until(lambda: self.baton.num_tasks == 1, END_S, "the last tasks of a life")

    def _keep(self, life: LifeUnderway, workers: Mapping[int, Task], fronts: Sequence[Task]) -> None:
        assert life.head_task is not None
        errors = [] if life.loop is None else [f"the head's loop: {error}" for error in life.loop.errors]
        self.lives.append(
            Life(
                life.number,
                life.epoch,
                life.head_task.result,
                {rank: task.result for rank, task in workers.items()},
                {index: task.result for index, task in enumerate(fronts)},
                tuple(fault for fault in self.network.fired if fault.life == life.number),
                (*life.meeting.violations, *errors),
                self.baton.turns - life.began_turn,
                self.baton.now - life.began_s,
                life.head,
                tuple(life.incidents),
            )
        )

    # Faults of processes -------------------------------------------------------------------------------------------

    def _plan_process_faults(self, life: LifeUnderway) -> None:
        mine = [fault for fault in self._faults if isinstance(fault, ProcessFault) and fault.life == life.number]
        self._due = sorted((f for f in mine if f.at_turn is not None), key=lambda f: f.at_turn or 0, reverse=True)
        for fault in mine:
            if fault.at_turn is None:
                self.baton.call_in(fault.at_s or 0.0, partial(self._strike, life, fault))

    def _note_turn(self) -> None:
        life = self.underway
        while life is not None and self._due and self.baton.turns - life.began_turn >= (self._due[-1].at_turn or 0):
            self._strike(life, self._due.pop())
        if self._at_turn is not None:
            self._at_turn(self)

    def _strike(self, life: LifeUnderway, fault: ProcessFault) -> None:
        process = life.processes.get(fault.process)
        if process is None or process.is_dead or life is not self.underway:
            return
        self.network.fired.append(fault)
        if fault.kind == "kill":
            process.kill()
            return
        process.stop()
        if fault.for_s is None:
            life.stopped_for_good.add(process)
        else:
            self.baton.call_in(fault.for_s, process.resume)


def _run_front(script: Script, life: LifeUnderway, index: int, keys: KeyPair) -> Any:
    return script(Seat(life, index, life.processes[f"front {index}"], keys))


def _check_head(link: WorkerLink) -> None:
    reason = link.lost()
    if reason is not None:
        raise LinkLost(reason, rank=0)
