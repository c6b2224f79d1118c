# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Worker`: one rank that carries out the head's commands until it is told to stop or its link is lost.

It owns no policy, no random number and no allocator. A command that fails is answered and forgotten; anything else
that goes wrong makes `run` raise, and the process leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metrale_ray.clock import Clock
from metrale_ray.config import EngineConfig
from metrale_ray.errors import EpCommandFailed, LinkLost
from metrale_ray.incidents import keep_incident
from metrale_ray.last_commands import RememberingPort, started_record
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.device import own_cores, use_threads
from metrale_ray.model.execute import Replica
from metrale_ray.model.ranks import RankSetup, build_replica, introduce, open_rank
from metrale_ray.model.rendezvous import join_ranks
from metrale_ray.model.torch_distributed import join_store
from metrale_ray.model.transformer import TransformerModel
from metrale_ray.protocol.commands import CommandFrame, Hello, Progress, Rank, Welcome
from metrale_ray.protocol.journal.records import Record
from metrale_ray.protocol.keys import new_keys
from metrale_ray.protocol.link import WorkerLink
from metrale_ray.protocol.transport import Transport
from metrale_ray.protocol.zmq_transport import ZmqTransport

log = logging.getLogger(__name__)

Keep = Callable[[EngineConfig, int, Sequence[Record]], object]
JoinGroup = Callable[[RankSetup, WorkerLink], Collectives]


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where a worker finds the head and by which public key it knows it: its own link, and the rendezvous store of the
    collectives."""

    link: str
    head_key: str
    store_host: str
    store_port: int


class Worker:
    """One rank, 1..n-1. `host` is this node's own address. `keep` gets its last commands when it ends badly.

    `process` names it to the other ranks; None: by its number.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        host: str,
        clock: Clock = time.monotonic,
        keep: Keep = keep_incident,
        process: str | None = None,
    ) -> None:
        self.rank = rank
        self._config = config
        self._host = host
        self._clock = clock
        self._keep = keep
        self._process = process
        self._keys = new_keys()

    @property
    def public_key(self) -> str:
        """By which the head knows this process."""
        return self._keys.public

    def run(self, head: HeadAddress) -> None:
        """Serve over sockets until shutdown. Raises what makes this rank leave, naming the rank."""
        use_threads(self._config.threads_per_rank)
        name = f"the head at {head.link.removeprefix('tcp://')}"
        transport = ZmqTransport.connect(head.link, name, self._keys, head.head_key)
        with own_cores(self._config, self.rank):  # from here on, so that ZeroMQ's threads run anywhere
            self.serve(transport, lambda setup, link: self._join_group(setup, link, head))

    def serve(self, transport: Transport, join_group: JoinGroup) -> None:
        """Shake hands, build the rank, and carry out commands until shutdown. Closes the link in any case."""
        link = WorkerLink(Rank(self.rank), transport, self._config.worker_version())
        collectives: Collectives | None = None
        try:
            setup = open_rank(self._config, self.rank, self._host, self._process)
            hello = introduce(setup)
            link.hello(hello)
            welcome = link.expect_welcome(self._config.start_timeout_s)
            collectives = join_group(setup, link)
            port = RememberingPort(link, self._clock)
            replica, model = build_replica(setup, collectives, port, _report(link), self._clock)
            log.info("rank %d is in the group", self.rank)
            try:
                self._loop(replica, model)
            except Exception as error:
                self._keep(self._config, self.rank, self._last_records(port, hello, welcome, error))
                raise
            finally:
                model.teardown()
        finally:
            if collectives is not None:
                collectives.close()
            link.close()

    def _last_records(self, port: RememberingPort, hello: Hello, welcome: Welcome, error: Exception) -> list[Record]:
        now_us = port.now_us
        began_s = time.time() - now_us * 1e-6
        started = started_record(self._config, [hello], port.num_blocks, welcome.epoch, (), began_s)
        return port.last_commands.records(started, now_us, self.rank, error)

    def _loop(self, replica: Replica, model: TransformerModel) -> None:
        while True:
            try:
                if not model.ep.ep_worker_step(replica):
                    return
            except EpCommandFailed as failure:
                log.warning("rank %d stays up after a failed %s: %s", self.rank, failure.cmd, failure.message)

    def _join_group(self, setup: RankSetup, link: WorkerLink, head: HeadAddress) -> Collectives:
        config = self._config
        return join_ranks(
            self.rank,
            config.ep_size,
            config.max_num_batched_tokens,
            setup.decoder.hidden_size,
            setup.dtype,
            str(setup.device),
            store=join_store(head.store_host, head.store_port, config.step_timeout_s),
            host=self._host,
            timeout_s=config.step_timeout_s,
            check_peers=lambda: _check_head(link),
        )


def _report(link: WorkerLink) -> Callable[[Replica, CommandFrame, Progress], None]:
    return lambda replica, frame, progress: link.reply(replica.progress_reply(frame, progress))


def _check_head(link: WorkerLink) -> None:
    reason = link.lost()
    if reason is not None:
        raise LinkLost(reason, rank=0)
