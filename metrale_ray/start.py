# SPDX-License-Identifier: MIT OR Apache-2.0
"""The start of an engine, from open links to loaded ranks: the handshake, and then the load.

The same for a head in a process of its own and for one that shares a process with its workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from metrale_ray.clock import Clock
from metrale_ray.engine import Delivery, Engine
from metrale_ray.errors import HandshakeError
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.execute import Replica
from metrale_ray.model.ranks import RankSetup, build_replica, differences, introduce
from metrale_ray.protocol.commands import CommandFrame, Hello, Progress, Rank, Welcome
from metrale_ray.protocol.link import HeadLink, HeadPort
from metrale_ray.protocol.session import HeadSession
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.recording import Recording
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.scheduler import Scheduler
from metrale_ray.vocabulary import within

log = logging.getLogger(__name__)

OnLoad = Callable[[Rank, Progress], None]


class Met(NamedTuple):
    """The ranks of an epoch, by what each said of itself, and the KV blocks that every one of them can hold."""

    hellos: tuple[Hello, ...]
    num_blocks: int


def shake_hands(setup: RankSetup, links: Sequence[HeadLink], epoch: int, clock: Clock = time.monotonic) -> Met:
    """Hear every worker, compare it with rank 0, and answer all alike.

    Raises HandshakeError with one line for each difference, LinkLost when a worker does not come.
    """
    config = setup.config
    mine = introduce(setup)
    deadline = clock() + config.start_timeout_s
    hellos = (mine, *(link.expect_hello(max(0.0, deadline - clock())) for link in links))
    for hello in hellos:
        log.info("rank %d: %s, %d KV blocks", hello.rank, hello.told, hello.num_blocks)
    refusal = "\n".join(line for hello in hellos for line in differences(mine, hello))
    for link in links:
        link.welcome(Welcome(config.protocol_version.value, epoch, refusal))
    if refusal:
        raise HandshakeError(f"the ranks differ:\n{refusal}")
    return Met(hellos, min(hello.num_blocks for hello in hellos))


def start_engine(
    setup: RankSetup,
    links: Sequence[HeadLink],
    collectives: Collectives,
    met: Met,
    *,
    epoch: int,
    deliver: Callable[[list[Delivery]], None],
    on_load: OnLoad,
    clock: Clock = time.monotonic,
    recording: Recording | None = None,
) -> Engine:
    """Build rank 0, load every rank, and give the engine, ready. Raises StartError or LinkLost."""
    config, version = setup.config, setup.config.protocol_version
    session = HeadSession(version, epoch)
    replica, model = build_replica(
        setup, collectives, HeadPort(session, links), _on_own_progress(links, on_load), clock
    )
    engine = Engine(
        replica,
        model,
        session,
        links,
        version,
        step_timeout_s=config.step_timeout_s,
        seed=config.seed,
        eos_token_ids=setup.checkpoint.eos_token_ids,
        deliver=deliver,
        clock=clock,
        recording=recording,
    )
    eos = within(setup.checkpoint.eos_token_ids, setup.decoder.vocab_size)
    engine.recording.start(config, met.hellos, met.num_blocks, epoch, eos)
    engine.start(Scheduler(_scheduler_limits(setup, met.num_blocks)), met.num_blocks, on_load)
    return engine


def _on_own_progress(links: Sequence[HeadLink], on_load: OnLoad) -> Callable[[Replica, CommandFrame, Progress], None]:
    """While rank 0 loads, each piece of its progress is a moment to read the others'."""

    def note(replica: Replica, frame: CommandFrame, progress: Progress) -> None:
        on_load(Rank(0), progress)
        for link in links:
            link.poll_progress(_for_rank(on_load, link.rank))

    return note


def _for_rank(on_load: OnLoad, rank: Rank) -> Callable[[Progress], None]:
    return lambda progress: on_load(rank, progress)


def _scheduler_limits(setup: RankSetup, num_blocks: int) -> SchedulerLimits:
    config = setup.config
    return SchedulerLimits(
        max_batch_size=config.max_batch_size,
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=config.block_size,
        watermark=config.watermark,
        max_queue_len=config.max_queue_len,
        mixed_steps=config.protocol_version is not ProtocolVersion.V1,
    )
