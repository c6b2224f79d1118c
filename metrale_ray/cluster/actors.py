# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head and the workers as Ray actors.

Rules: an actor ends with the Ray that started it, and by itself once its run has ended: a node that is cut off from its
driver and from Ray's head is told nothing. A rank listens on the address by which Ray's other nodes know its node, and
on no other; on a Ray of our own, which is one machine, on the loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

import ray

from metrale_ray.config import EngineConfig
from metrale_ray.errors import EngineDead
from metrale_ray.head import Head, HeadState
from metrale_ray.process_end import die_at_sigterm, die_with_parent
from metrale_ray.worker import HeadAddress, Worker

# Once its run has ended, an actor is there to be asked why. Its driver has read that and ended it long before this.
LEAVE_S = 5.0
STOPPED = "the engine was stopped"


@dataclass(frozen=True, slots=True)
class WayIn:
    """What a front must know of an engine that runs: where its head is, the head's public key, the settings, and where
    each rank is."""

    front_address: str
    head_key: str
    config: EngineConfig
    ranks: list[dict[str, Any]]


class HeadActor:
    """`Head` as a Ray actor. Ray's own loop is the head's asyncio loop."""

    def __init__(self, config: EngineConfig, host: str | None) -> None:
        die_with_parent()
        die_at_sigterm()
        _log_to_stderr(config)
        self._host = host or _node_address()
        self._config = config
        self._head = Head(config, self._host)
        self._places: list[dict[str, Any]] = []
        self._has_ended = asyncio.Event()
        self._num_asking = 0  # who waits for that

    async def listen(
        self, worker_keys: dict[int, str], front_key: str, places: list[dict[str, Any]]
    ) -> tuple[dict[int, HeadAddress], str, str]:
        """Open every door, to the processes with these public keys alone: one address for each worker, the fronts' one
        and the head's own public key. `places`: where each rank is, for whoever asks."""
        addresses = await self._head.listen(worker_keys)
        self._places = places
        self._head.note_places(places)
        self._head.allow_front(front_key, is_lasting=True)  # the driver's own, which is allowed but once
        return addresses, self._head.front_address, self._head.public_key

    async def allow_front(self, public_key: str) -> None:
        """Let one more front connect; its key is good while it has a session and some minutes after."""
        self._head.allow_front(public_key)

    async def way_in(self, public_key: str) -> WayIn | None:
        """Let the front with this key in; None while the engine is not ready. Raises EngineDead once it has ended."""
        phase = self._head.state.phase
        if phase == "ended":
            raise self._death()
        if phase != "ready":
            return None
        self._head.allow_front(public_key)
        return WayIn(self._head.front_address, self._head.public_key, self._config, self._places)

    async def ended(self, timeout_s: float) -> EngineDead | None:
        """Wait so long for the engine's end, and say why it has ended; None while it runs."""
        self._num_asking += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), timeout_s)
        finally:
            self._num_asking -= 1
        return self._death() if self._has_ended.is_set() else None

    async def serve(self) -> None:
        """Run the engine to its end."""
        try:
            await self._head.serve()
        finally:
            self._has_ended.set()
            _leave_soon()
            while self._num_asking:  # whoever started the engine ends this process once this returns
                await asyncio.sleep(0)

    async def state(self) -> HeadState:
        """The phase and the progress of a load."""
        return self._head.state

    async def stats(self) -> dict[str, Any]:
        """Gauges and counters."""
        return await self._head.stats()

    async def stop(self) -> None:
        """End after the current step."""
        await self._head.stop()

    async def whoami(self) -> dict[str, Any]:
        """Process id, node and address of this rank."""
        return _whoami(0, self._host)

    def _death(self) -> EngineDead:
        failure = self._head.state.failure
        if failure is None:
            return EngineDead(STOPPED)
        return EngineDead(failure.message, rank=getattr(failure, "rank", None))


class WorkerActor:
    """`Worker` as a Ray actor. `run` occupies its thread for good; questions have a concurrency group of their own."""

    def __init__(self, config: EngineConfig, rank: int, host: str | None) -> None:
        die_with_parent()
        die_at_sigterm()
        _log_to_stderr(config)
        self._rank = rank
        self._host = host or _node_address()
        self._worker = Worker(config, rank, self._host)

    def run(self, head: HeadAddress) -> None:
        """Carry out commands until shutdown."""
        try:
            self._worker.run(head)
        finally:
            _leave_soon()

    def public_key(self) -> str:
        """By which the head knows this process."""
        return self._worker.public_key

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def whoami(self) -> dict[str, Any]:
        """Process id, node and address of this rank."""
        return _whoami(self._rank, self._host)


def _leave_soon() -> None:
    """End this process in a while, whatever its other threads do then."""
    timer = threading.Timer(LEAVE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _node_address() -> str:
    """The address by which Ray's other nodes know this one: of several interfaces, a guess may name another."""
    here = ray.get_runtime_context().get_node_id()
    address: str = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
    return address


def _whoami(rank: int, host: str) -> dict[str, Any]:
    return {"rank": rank, "pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "address": host}


def _log_to_stderr(config: EngineConfig) -> None:
    """Ray keeps each actor's stderr in its log files."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
