# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a head's process stands on: its clock, its threads, the ways to the other ranks and to the fronts.

Rules: nothing here decides anything. `HostSurroundings` are the real ones: the system's clock and threads, ZeroMQ, and
torch.distributed. Others run the same head in virtual time, over a network that does what a seed says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from metrale_ray.clock import Clock, Condition
from metrale_ray.config import EngineConfig
from metrale_ray.incidents import keep_incident, open_journal_of
from metrale_ray.model.collectives import Collectives, OneRank
from metrale_ray.model.device import own_cores
from metrale_ray.model.ranks import RankSetup
from metrale_ray.model.rendezvous import join_ranks
from metrale_ray.model.torch_distributed import host_store
from metrale_ray.protocol.front import FrontRouter, IsAllowed, Router
from metrale_ray.protocol.journal.journal import Journal
from metrale_ray.protocol.journal.records import Record
from metrale_ray.protocol.keys import KeyPair, new_keys
from metrale_ray.protocol.transport import Listening
from metrale_ray.protocol.zmq_transport import ZmqTransport

T = TypeVar("T")


class Surroundings(Protocol):
    """Of one head's process. `keys` are its own; workers and fronts know it by the public one."""

    clock: Clock
    keys: KeyPair
    num_cores: int  # of this machine
    process: str | None  # its name in what the ranks tell each other; None: its number

    def condition(self) -> Condition:
        """A lock with waits, for any threads of this process."""
        ...

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` gives, which may take long. The process does not end before it."""
        ...

    async def aside(self, work: Callable[[], T]) -> T:
        """As `in_thread`, but the process may end before it."""
        ...

    def own_cores(self) -> contextlib.AbstractContextManager[object]:
        """Keep the calling thread, which is to compute, on cores of this rank alone, where that is wanted."""
        ...

    def listen(self, rank: int, worker_key: str) -> Listening:
        """The head's end of the link to a worker, which has this public key. Raises StartError."""
        ...

    def open_group(self) -> int:
        """Open the meeting point of the ranks' collectives; its port. Called once, before `join_group`."""
        ...

    def join_group(self, setup: RankSetup, check_peers: Callable[[], None]) -> Collectives:
        """Rank 0's end of the group. `check_peers` raises LinkLost when one has gone. Raises LinkLost."""
        ...

    def front_router(self, is_allowed: IsAllowed) -> Router:
        """The head's end of all fronts' connections."""
        ...

    def journal(self) -> Journal:
        """Where the head notes what it does. Raises ConfigError where there is to be one and cannot be."""
        ...

    def keep_incident(self, records: Sequence[Record]) -> None:
        """Keep the last commands of an engine that ended badly, for whoever looks into it. Never raises."""
        ...


class HostSurroundings:
    """This host's. `host` is this node's own address."""

    def __init__(self, config: EngineConfig, host: str) -> None:
        self.clock: Clock = time.monotonic
        self.keys = new_keys()
        self.num_cores = os.cpu_count() or 1
        self.process: str | None = None
        self._config = config
        self._host = host
        self._store: Any = None

    def condition(self) -> Condition:
        """See Surroundings."""
        return threading.Condition()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """See Surroundings."""
        return await asyncio.to_thread(work)

    async def aside(self, work: Callable[[], T]) -> T:
        """See Surroundings."""
        return await in_daemon_thread(work)

    def own_cores(self) -> contextlib.AbstractContextManager[object]:
        """See Surroundings."""
        return own_cores(self._config, 0)

    def listen(self, rank: int, worker_key: str) -> Listening:
        """See Surroundings."""
        return ZmqTransport.listen(self._host, f"rank {rank}", self.keys, worker_key)

    def open_group(self) -> int:
        """See Surroundings."""
        self._store, port = host_store(self._host, self._config.start_timeout_s)
        return port

    def join_group(self, setup: RankSetup, check_peers: Callable[[], None]) -> Collectives:
        """See Surroundings."""
        config = self._config
        sizes = (config.max_num_batched_tokens, setup.decoder.hidden_size, setup.dtype)
        if config.ep_size == 1:
            return OneRank(0, 1, *sizes, str(setup.device))
        return join_ranks(
            0,
            config.ep_size,
            *sizes,
            str(setup.device),
            store=self._store,
            host=self._host,
            timeout_s=config.step_timeout_s,
            check_peers=check_peers,
        )

    def front_router(self, is_allowed: IsAllowed) -> Router:
        """See Surroundings."""
        return FrontRouter(self._host, self.keys, is_allowed)

    def journal(self) -> Journal:
        """See Surroundings."""
        return open_journal_of(self._config)

    def keep_incident(self, records: Sequence[Record]) -> None:
        """See Surroundings."""
        keep_incident(self._config, 0, records)


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` gives, from a thread that keeps no process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  whoever waits is told, whatever it is
            _tell(loop, future, partial(future.set_exception, error))
        else:
            _tell(loop, future, partial(future.set_result, result))

    threading.Thread(target=run, name="aside", daemon=True).start()
    return future


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], tell: Callable[[], None]) -> None:
    """Nobody is told when the loop has ended, or when nobody waits any more."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if future.done() else tell())
