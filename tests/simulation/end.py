# SPDX-License-Identifier: MIT OR Apache-2.0
"""`End`: one end of a connection between two processes: what is on its way, what has come, and when its peer has gone.

Rules: see `network`, which draws delays, knows partitions and numbers the frames. Nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metrale_ray.baton import Process

if TYPE_CHECKING:
    from tests.simulation.network import Network


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How long an end may hear nothing before it takes its peer for gone: drawn anew for each silence."""

    limit_s: tuple[float, float]


@dataclass
class _Frame:
    """On its way, or held up; `data` None is the connection's end."""

    data: bytes | None
    is_lost: bool = False


class End:
    """One end of a connection between two processes. Nothing here waits.

    `frames` are those that have arrived and were not taken; `at_news` is called when one came or the peer was lost.
    """

    def __init__(self, network: Network, owner: Process, peer_name: str, heartbeat: Heartbeat) -> None:
        self.owner = owner
        self.peer_name = peer_name
        self.frames: deque[bytes] = deque()
        self.lost: str | None = None  # why the peer has gone
        self.is_closed = False
        self.at_news: Callable[[], None] | None = None
        self.num_arrived = 0
        self.peer: End  # the other end
        self._network = network
        self._heartbeat = heartbeat
        self._underway: deque[_Frame] = deque()  # to the peer, in order
        self._held: deque[_Frame] = deque()  # by a partition, before the peer
        self._last_at_s = 0.0  # when the last frame that was sent arrives
        self._silence = 0  # the number of this end's silence; 0 while the peer can be heard
        self._num_silences = 0

    @property
    def is_up(self) -> bool:
        """Whether anything can still arrive here."""
        return not self.is_closed and self.lost is None and not self.owner.is_dead

    @property
    def num_unread(self) -> int:
        """Frames that were sent here and that the peer has not taken."""
        return len(self._underway) + len(self._held) + len(self.peer.frames)

    def send(self, data: bytes) -> None:
        """Put one frame on its way; it is let go when this end or its process has gone."""
        if self.is_up:
            self._network.carry(self, data)

    def ship(self, data: bytes | None, extra_s: float) -> None:
        """Put a frame, or the end of the connection, on its way; `extra_s` later than it would come."""
        baton = self._network.baton
        delay_s = self._network.draw_delay_s() if data is not None else self._network.draw_gone_s()
        self._last_at_s = max(baton.now + delay_s + extra_s, self._last_at_s)
        self._underway.append(_Frame(data))
        baton.call_at(self._last_at_s, self._arrive)

    def close(self) -> None:
        """Leave. What was sent arrives before the end does. Of a dead process it does nothing."""
        if not self.is_closed and not self.owner.is_dead:
            self.is_closed = True
            if self.lost is None:
                self.ship(None, 0.0)

    def open_at(self, when_s: float) -> None:
        """Nothing that is sent arrives before the connection is made."""
        self._last_at_s = max(self._last_at_s, when_s)

    def lose(self, reason: str) -> None:
        """The peer has gone, as this end sees it. The peer learns of it when it can."""
        if self.is_up:
            self.lost = reason
            if self.peer.is_up:
                self.ship(None, 0.0)
            self._tell()

    def refuse(self, reason: str) -> None:
        """This end's peer never took the connection."""
        self.lost = reason
        self.peer.is_closed = True
        self._tell()

    def _arrive(self) -> None:
        frame = self._underway.popleft()
        if self._held or self._network.is_cut(self.owner.name, self.peer.owner.name):
            self._held.append(frame)
        else:
            self._put(frame)

    def release(self) -> None:
        """Nothing holds up this direction any more."""
        while self._held:
            self._put(self._held.popleft())

    def _put(self, frame: _Frame) -> None:
        """One frame comes to the peer."""
        peer = self.peer
        if not peer.is_up or frame.is_lost:
            return
        if frame.data is None:
            peer.lost = f"{peer.peer_name} has gone: its connection ended or its heartbeat is overdue"
        else:
            peer.frames.append(frame.data)
            peer.num_arrived += 1
        peer._tell()

    def _tell(self) -> None:
        if self.at_news is not None:
            self.at_news()

    def owner_changed(self) -> None:
        """The process of this end was stopped, resumed or killed."""
        if self.owner.is_dead:
            self._die()
        self.look()
        self.peer.look()

    def _die(self) -> None:
        chance = self._network.chance
        if self.is_closed or self.lost is not None:
            return  # its end is on its way
        num_lost = chance.randint(0, len(self._underway)) if chance.random() < 0.5 else 0
        for frame in list(self._underway)[len(self._underway) - num_lost :]:
            frame.is_lost = True
        if not self._network.is_silent_death(self.owner):
            self.ship(None, 0.0)

    def look(self) -> None:
        """Whether this end's peer has fallen silent, or can be heard again; a silence that lasts ends in a loss."""
        if not self._is_silent():
            self._silence = 0
        elif self._silence == 0 and self.is_up:
            self._num_silences += 1
            self._watch(self._num_silences)

    def _watch(self, silence: int) -> None:
        self._silence = silence
        network = self._network
        network.baton.call_in(network.chance.uniform(*self._heartbeat.limit_s), lambda: self._overdue(silence))

    def _overdue(self, silence: int) -> None:
        if self._silence != silence or not self.is_up:
            return
        if self.owner.is_stopped:  # it cannot notice now, and what came meanwhile is heard first
            self._watch(silence)
        else:
            self.lose(f"{self.peer_name} has gone: its connection ended or its heartbeat is overdue")

    def _is_silent(self) -> bool:
        """A heartbeat is a question and an answer, so one direction that is cut silences both."""
        mine, other = self.owner, self.peer.owner
        network = self._network
        return (
            other.is_stopped
            or other.is_dead
            or network.is_cut(mine.name, other.name)
            or network.is_cut(other.name, mine.name)
        )
