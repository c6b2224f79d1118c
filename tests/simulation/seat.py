# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Seat`: what one front's script gets: its place in a life, its tasks, and the way to the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from metrale_ray.baton import Baton, Process, Task
from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient
from metrale_ray.protocol.keys import KeyPair
from tests.simulation.baton_condition import BatonCondition
from tests.simulation.life import LifeUnderway
from tests.simulation.sim_front import SimConnection
from tests.simulation.sim_surroundings import front_address


class Seat:
    """What one front's script gets: its place in a life. `index` from 0."""

    def __init__(self, life: LifeUnderway, index: int, process: Process, keys: KeyPair) -> None:
        self.index = index
        self.life = life.number
        self.process = process
        self._life = life
        self._keys = keys

    @property
    def baton(self) -> Baton:
        """To wait by, in virtual time."""
        return self._life.baton

    @property
    def processes(self) -> Mapping[str, Process]:
        """All processes of this life, by name."""
        return self._life.processes

    @property
    def is_ready(self) -> bool:
        """Whether the head says that the engine is ready."""
        return self._life.is_ready

    @property
    def has_head_ended(self) -> bool:
        """Whether the head's process has left."""
        return self._life.has_head_ended

    @property
    def now_s(self) -> float:
        """Virtual seconds since the life began."""
        return self._life.baton.now - self._life.began_s

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.baton.wait_until(lambda: False, seconds, "its time to come")

    def start(self, name: str, work: Callable[[], Any]) -> Task:
        """One more task of this front's process."""
        return self.baton.start(f"{self.process.name} {name}", work, self.process)

    def condition(self) -> BatonCondition:
        """For tasks of this front."""
        return BatonCondition(self.baton)

    def wait_ready(self) -> None:
        """Wait until the engine is ready, as Ray tells it. Raises EngineDead when it ends before."""
        life = self._life
        self.baton.wait_until(lambda: life.is_ready or life.has_head_ended, None, "a ready engine")
        if not life.is_ready:
            raise EngineDead("the engine ended before it was ready", rank=0)

    def client(self) -> FrontClient:
        """A new session with the head; see FrontClient. The head must be listening, as it is when it is ready."""
        life = self._life
        connect = partial(SimConnection, life.baton, life.network, self.process)
        return FrontClient(
            front_address(life.number),
            self._keys,
            life.head_key,
            connect=connect,
            condition=self.condition,
            clock=lambda: life.baton.now,
        )


Script = Callable[[Seat], Any]
