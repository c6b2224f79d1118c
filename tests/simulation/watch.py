# SPDX-License-Identifier: MIT OR Apache-2.0
"""`watch`: looks into the ranks of a run from outside, so that the engine needs no code for it.

It keeps each rank's slots, for the ledger; what ended an engine, before that is put into the words of its fronts; which
faults inside the ranks were raised; what fronts ended; and every output that reached a front. It notes whoever carries
out a command, or takes a reply, of another epoch than the life's, and who is preempted and should not be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from metrale_ray.config import FaultSpec
from metrale_ray.head import Head
from metrale_ray.inbox import Inbox
from metrale_ray.model.execute import Replica
from metrale_ray.model.faults import Faults
from metrale_ray.model.ranks import RankSetup, build_replica
from metrale_ray.model.slots import Slots
from metrale_ray.protocol.commands import CommandFrame, Reply
from metrale_ray.protocol.front import Abort, Finish, FrontClient, FrontId, FrontServer, Output
from metrale_ray.protocol.link import HeadLink
from metrale_ray.scheduler.request import Sequence
from metrale_ray.scheduler.scheduler import Scheduler
from tests.simulation.ledger import Unwanted


@dataclass(slots=True)
class Sight:
    """What was seen of one life."""

    epoch: int
    slots: dict[int, Slots] = field(default_factory=dict)  # by rank
    complaints: list[str] = field(default_factory=list)
    raised: list[FaultSpec] = field(default_factory=list)
    over: Counter[FrontId] = field(default_factory=Counter)  # sessions that have ended, by how often
    gone: Counter[FrontId] = field(default_factory=Counter)  # fronts of which the head was told that they went
    unwanted: list[Unwanted] = field(default_factory=list)
    failure: BaseException | None = None  # what ended the engine


class Watch:
    """What is seen. `now` is of the life that is under way."""

    def __init__(self) -> None:
        self.now = Sight(0)
        self._born: dict[Replica, int] = {}  # in which epoch
        self._listeners: dict[FrontClient, Callable[[Output], None]] = {}

    def begin(self, epoch: int) -> Sight:
        """A life begins."""
        self.now = Sight(epoch)
        return self.now

    def listen(self, client: FrontClient, take: Callable[[Output], None]) -> None:
        """Give every output that reaches `client` to `take`, in order."""
        self._listeners[client] = take


@contextmanager
def watch() -> Iterator[Watch]:
    """While this lasts every head, rank and front of this process is seen."""
    seen = Watch()
    with (
        mock.patch("metrale_ray.worker.build_replica", _building(seen)),
        mock.patch("metrale_ray.start.build_replica", _building(seen)),
        mock.patch.object(Replica, "run", _running(seen, Replica.run)),
        mock.patch.object(HeadLink, "collect", _collecting(seen, HeadLink.collect)),
        mock.patch.object(Faults, "_fire", _raising(seen, Faults._fire)),
        mock.patch.object(Head, "_describe", _describing(seen, Head._describe)),
        mock.patch.object(Head, "_on_gone", _going(seen, Head._on_gone)),
        mock.patch.object(FrontServer, "_drop", _dropping(seen, FrontServer._drop)),
        mock.patch.object(Inbox, "end", _hearing_end(seen, Inbox.end)),
        mock.patch.object(Inbox, "gone", _hearing_gone(seen, Inbox.gone)),
        mock.patch.object(Scheduler, "_preempt", _preempting(seen, Scheduler._preempt)),
        mock.patch.object(FrontClient, "_hand_out", _handing_out(seen, FrontClient._hand_out)),
    ):
        yield seen


def _building(seen: Watch) -> Any:
    def build(setup: RankSetup, *arguments: Any, **named: Any) -> Any:
        replica, model = build_replica(setup, *arguments, **named)
        seen.now.slots[setup.rank] = replica.slots
        seen._born[replica] = seen.now.epoch
        return replica, model

    return build


def _running(seen: Watch, run: Any) -> Any:
    def run_seen(self: Replica, frame: CommandFrame) -> Reply:
        epoch = seen._born[self]
        if frame.envelope.epoch != epoch:
            seen.now.complaints.append(f"rank {self.rank} carries out {frame.envelope} in epoch {epoch}")
        return run(self, frame)  # type: ignore[no-any-return]

    return run_seen


def _collecting(seen: Watch, collect: Any) -> Any:
    def collect_seen(self: HeadLink, frame: CommandFrame, *arguments: Any) -> Reply:
        reply: Reply = collect(self, frame, *arguments)
        said = (reply.epoch, reply.seq, reply.rank)
        if said != (seen.now.epoch, frame.envelope.seq, self.rank):
            seen.now.complaints.append(f"the head takes {said} for the answer of rank {self.rank} to {frame.envelope}")
        return reply

    return collect_seen


def _raising(seen: Watch, fire: Any) -> Any:
    def fire_seen(self: Faults, spec: FaultSpec, *arguments: Any) -> None:
        seen.now.raised.append(spec)
        fire(self, spec, *arguments)

    return fire_seen


def _describing(seen: Watch, describe: Any) -> Any:
    def describe_seen(self: Head, error: BaseException) -> Any:
        seen.now.failure = error
        return describe(self, error)

    return describe_seen


def _going(seen: Watch, on_gone: Any) -> Any:
    def on_gone_seen(self: Head, front: FrontId) -> None:
        seen.now.gone[front] += 1
        on_gone(self, front)

    return on_gone_seen


def _dropping(seen: Watch, drop: Any) -> Any:
    def drop_seen(self: FrontServer, session: Any, reason: str | None) -> None:
        seen.now.over[session.front_id] += 1
        drop(self, session, reason)

    return drop_seen


def _hearing_end(seen: Watch, end: Any) -> Any:
    def end_seen(self: Inbox, front: FrontId, said: Abort | Finish) -> None:
        index = said.index if isinstance(said, Finish) else None
        seen.now.unwanted.append((front, said.request_id, index))
        end(self, front, said)

    return end_seen


def _hearing_gone(seen: Watch, gone: Any) -> Any:
    def gone_seen(self: Inbox, front: FrontId) -> None:
        seen.now.unwanted.append((front, None, None))
        gone(self, front)

    return gone_seen


def _preempting(seen: Watch, preempt: Any) -> Any:
    def preempt_seen(self: Scheduler, sequence: Sequence) -> None:
        others = sorted((each.request.priority, each.arrival) for each in self._running.values())[1:]
        if (sequence.request.priority, sequence.arrival) not in others:
            seen.now.complaints.append(f"request {sequence.request_id} is preempted, and is the first that runs")
        elif sequence.request.priority < others[-1][0]:
            seen.now.complaints.append(f"request {sequence.request_id} is preempted, and others matter less: {others}")
        preempt(self, sequence)

    return preempt_seen


def _handing_out(seen: Watch, hand_out: Any) -> Any:
    def hand_out_seen(self: FrontClient, frame: Any) -> None:
        take = seen._listeners.get(self)
        for output in frame.outputs if take is not None else ():
            take(output)
        hand_out(self, frame)

    return hand_out_seen
