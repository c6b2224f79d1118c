# SPDX-License-Identifier: MIT OR Apache-2.0
"""`watch`: looks into the ranks of a run from outside, so that the engine needs no code for it.

It keeps each rank's slots, for the ledger, and notes whoever carries out a command, or takes a reply, of another epoch
than the life's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from metrale_ray.model.execute import Replica
from metrale_ray.model.ranks import RankSetup, build_replica
from metrale_ray.model.slots import Slots
from metrale_ray.protocol.commands import CommandFrame, Reply
from metrale_ray.protocol.link import HeadLink


@dataclass(slots=True)
class Watch:
    """What was seen. `epoch` is the running life's; set it when a life begins, and `slots` to none."""

    epoch: int = 0
    slots: dict[int, Slots] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    born: dict[int, tuple[Replica, int]] = field(default_factory=dict)  # by id, with the epoch it was built in

    def begin(self, epoch: int) -> None:
        """A life begins."""
        self.epoch, self.slots, self.complaints = epoch, {}, []


@contextmanager
def watch() -> Iterator[Watch]:
    """While this lasts every rank that is built in this process is seen."""
    seen = Watch()
    run, collect = Replica.run, HeadLink.collect

    def built(setup: RankSetup, *arguments: Any, **named: Any) -> Any:
        replica, model = build_replica(setup, *arguments, **named)
        seen.slots[setup.rank] = replica.slots
        seen.born[id(replica)] = replica, seen.epoch
        return replica, model

    def watched_run(self: Replica, frame: CommandFrame) -> Reply:
        _, epoch = seen.born[id(self)]
        if frame.envelope.epoch != epoch:
            seen.complaints.append(f"rank {self.rank} carries out {frame.envelope} in epoch {epoch}")
        return run(self, frame)

    def watched_collect(self: HeadLink, frame: CommandFrame, *arguments: Any) -> Reply:
        reply = collect(self, frame, *arguments)
        said = (reply.epoch, reply.seq, reply.rank)
        if said != (seen.epoch, frame.envelope.seq, self.rank):
            seen.complaints.append(f"the head takes {said} for the answer of rank {self.rank} to {frame.envelope}")
        return reply

    with (
        mock.patch("metrale_ray.worker.build_replica", built),
        mock.patch("metrale_ray.start.build_replica", built),
        mock.patch.object(Replica, "run", watched_run),
        mock.patch.object(HeadLink, "collect", watched_collect),
    ):
        yield seen
