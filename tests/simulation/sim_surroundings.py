# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SimSurroundings`: what a simulated head's process stands on. See `metrale_ray.surroundings`."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from zmq.utils import z85

from metrale_ray.baton import Baton, Process
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.ranks import RankSetup
from metrale_ray.protocol.front import IsAllowed
from metrale_ray.protocol.journal.journal import Journal, JournalState
from metrale_ray.protocol.journal.records import Record
from metrale_ray.protocol.keys import KeyPair
from tests.simulation.baton_condition import BatonCondition
from tests.simulation.baton_loop import BatonLoop
from tests.simulation.meeting import Meeting, SimCollectives
from tests.simulation.network import Network
from tests.simulation.sim_front import SimRouter
from tests.simulation.transports import SimTransport

T = TypeVar("T")
GROUP_PORT = 1

ASIDE_S = (0.0, 0.002, 0.02)
"""How long a grammar may take, in virtual seconds."""


class LivingJournal:
    """A journal of which a dead process writes nothing more."""

    def __init__(self, journal: Journal, process: Process) -> None:
        self._journal = journal
        self._process = process

    @property
    def is_on(self) -> bool:
        """See Journal."""
        return self._journal.is_on

    def note(self, record: Record) -> None:
        """See Journal."""
        if not self._process.is_dead:
            self._journal.note(record)

    def note_later(self, make: Callable[[], Record], num_bytes: int) -> None:
        """See Journal."""
        if not self._process.is_dead:
            self._journal.note_later(make, num_bytes)

    def state(self) -> JournalState | None:
        """As one in memory."""
        return JournalState(True)

    def wants_snapshot(self) -> bool:
        """See Journal."""
        return self._journal.wants_snapshot()

    def close(self, reason: str, failure: str | None) -> None:
        """See Journal."""
        if not self._process.is_dead:
            self._journal.close(reason, failure)


def drawn_keys(chance: random.Random) -> KeyPair:
    """A pair from a seed; nothing is encrypted with it."""
    return KeyPair(z85.encode(chance.randbytes(32)).decode("ascii"), "")


def front_address(life: int) -> str:
    """Where the fronts of one life connect."""
    return f"tcp://head:{life}"


class SimSurroundings:
    """Of one life's head. `chance` draws its keys, and how long its work aside takes."""

    num_cores = 3
    process: str | None = "head"

    def __init__(
        self,
        baton: Baton,
        network: Network,
        process: Process,
        meeting: Meeting,
        life: int,
        chance: random.Random,
        journal: Journal,
        incidents: list[Sequence[Record]],
    ) -> None:
        self.keys = drawn_keys(chance)
        self._chance = chance
        self._baton = baton
        self._network = network
        self._process = process
        self._meeting = meeting
        self._life = life
        self._journal = LivingJournal(journal, process)
        self._incidents = incidents
        self._numbers = itertools.count(1)

    def clock(self) -> float:
        """Virtual seconds."""
        return self._baton.now

    def condition(self) -> BatonCondition:
        """See Surroundings."""
        return BatonCondition(self._baton)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """See Surroundings."""
        return await BatonLoop.current().in_task(f"head thread {next(self._numbers)}", work, self._process)

    async def aside(self, work: Callable[[], T]) -> T:
        """See Surroundings. It takes a while, so that much may happen before a grammar is there."""
        while_s = self._chance.choice(ASIDE_S)
        baton = self._baton

        def work_slowly() -> T:
            baton.wait_until(lambda: False, while_s, "its work aside to be done")
            return work()

        return await self.in_thread(work_slowly)

    def own_cores(self) -> contextlib.AbstractContextManager[object]:
        """See Surroundings. All ranks are in one process, of which one runs at a time."""
        return contextlib.nullcontext()

    def listen(self, rank: int, worker_key: str) -> SimTransport:
        """See Surroundings."""
        address = f"tcp://head:{self._life}/{rank}"
        transport = SimTransport(self._baton, f"rank {rank}", None, address, worker_key)
        self._network.listen(self._process, address, self.keys.public, transport.accept)
        return transport

    def open_group(self) -> int:
        """See Surroundings."""
        return GROUP_PORT

    def join_group(self, setup: RankSetup, check_peers: Callable[[], None]) -> Collectives:
        """See Surroundings."""
        return joined(self._meeting, self._process, setup, check_peers)

    def front_router(self, is_allowed: IsAllowed) -> SimRouter:
        """See Surroundings."""
        return SimRouter(self._network, self._process, front_address(self._life), self.keys, is_allowed)

    def journal(self) -> Journal:
        """See Surroundings."""
        return self._journal

    def keep_incident(self, records: Sequence[Record]) -> None:
        """See Surroundings. They go to `incidents`."""
        if not self._process.is_dead:
            self._incidents.append(records)


def joined(meeting: Meeting, process: Process, setup: RankSetup, check_peers: Callable[[], None]) -> SimCollectives:
    """One rank's end of the group's sums."""
    config = setup.config
    return SimCollectives(
        meeting,
        process,
        setup.rank,
        config.max_num_batched_tokens,
        setup.decoder.hidden_size,
        setup.dtype,
        timeout_s=config.step_timeout_s,
        check_peers=check_peers,
    )
