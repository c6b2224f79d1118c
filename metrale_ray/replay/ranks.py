# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ReplayRanks`: all ranks of a group in this process, which carry out recorded frames one after another.

Rules: they are the engine's own replicas under the engine's own sums, in rank order; only the links are missing, so a
frame goes to each rank as it was recorded. Between two recorded commands a caller may run commands of its own
(`arrange`), which leave no trace but what they put into the slots.

What is left out: which frames (`player`), and what is made of the answers (`comparison`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from metrale_ray.baton import Baton, Deadlock
from metrale_ray.config import EngineConfig
from metrale_ray.model.collectives import Collectives, InProcess, InProcessGroup, OneRank
from metrale_ray.model.device import use_threads
from metrale_ray.model.execute import Replica
from metrale_ray.model.ranks import RankSetup, build_replica, introduce, open_rank
from metrale_ray.protocol.commands import Command, CommandFrame, Envelope, Progress, Reply, Settled, Status
from metrale_ray.replay.parting import Tensor

_ANY_MEMORY = 2**62
OnLoad = Callable[[int, int], None]
"""Called with the bytes that are loaded and all that are to be."""


class ReplayRanks:
    """The ranks of `config`, not loaded yet. Raises ConfigError, CheckpointError or StartError.

    `num_threads`: what each rank computes with, this whole process from now on; None leaves it. `on_load` is called
    while a Load is carried out.
    """

    def __init__(self, config: EngineConfig, *, num_threads: int | None = None, on_load: OnLoad | None = None) -> None:
        self.config = config
        if num_threads is not None:
            use_threads(num_threads)
        first = open_rank(config, 0)
        self.must_equal: Mapping[str, str] = introduce(_with_room(first)).must_equal
        self.checkpoint = first.checkpoint
        self.vocab_size = first.decoder.vocab_size
        self._on_load = on_load
        self._loaded: dict[int, Progress] = {}
        self._baton = Baton()
        group = InProcessGroup(self._baton, config.ep_size)
        setups = [dataclasses.replace(first, rank=rank) for rank in range(config.ep_size)]
        self._replicas = [self._replica(setup, _join(group, setup)) for setup in setups]

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return len(self._replicas)

    @property
    def logits(self) -> Tensor | None:
        """Rank 0's, of the last command: fp32 [rows, vocabulary]; None when it gave none."""
        return self._replicas[0].logits

    def run(self, frame: CommandFrame) -> list[Reply]:
        """Carry `frame` out on every rank, and give the replies in rank order. Raises LinkLost or Desync."""
        if len(self._replicas) == 1:
            return [self._replicas[0].run(frame)]
        tasks = {f"rank {replica.rank}": partial(replica.run, frame) for replica in self._replicas}
        results = list(self._baton.run(tasks).values())
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:  # where one leaves, the others wait in vain: its reason is the one to tell
            raise min(errors, key=lambda error: isinstance(error, Deadlock))
        return results

    def settle(self, settled: Settled) -> None:
        """Make what the last command left real, or drop it, before the next one says so."""
        for replica in self._replicas:
            replica.slots.settle(settled)

    def arrange(self, command: Command) -> list[Reply]:
        """Carry out a command that is not in the journal, and settle it. Whatever was staged has been settled."""
        frame = CommandFrame(Envelope(self.config.protocol_version, 0, 0, None), command, b"")
        replies = self.run(frame)
        self.settle(Settled(0, all(reply.status is Status.OK for reply in replies)))
        return replies

    def take_digest(self, digest: bytes) -> None:
        """Go on from a digest that was recorded."""
        for replica in self._replicas:
            replica.slots.digest = digest

    def _replica(self, setup: RankSetup, collectives: Collectives) -> Replica:
        return build_replica(setup, collectives, None, self._note_progress)[0]

    def _note_progress(self, replica: Replica, frame: CommandFrame, progress: Progress) -> None:
        self._loaded[replica.rank] = progress
        if self._on_load is not None:
            loaded = self._loaded.values()
            self._on_load(sum(each.done_bytes for each in loaded), sum(each.total_bytes for each in loaded))


def _with_room(setup: RankSetup) -> RankSetup:
    """The same for its introduction: how many blocks there are was decided when the journal was recorded."""
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, kv_cache_memory=_ANY_MEMORY))


def _join(group: InProcessGroup, setup: RankSetup) -> Collectives:
    sizes = (setup.config.max_num_batched_tokens, setup.decoder.hidden_size, setup.dtype)
    if group.world == 1:
        return OneRank(0, 1, *sizes, str(setup.device))
    return InProcess(group, setup.rank, *sizes, device=str(setup.device))
