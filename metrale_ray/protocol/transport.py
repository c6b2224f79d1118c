# SPDX-License-Identifier: MIT OR Apache-2.0
"""What carries frames between two ends, and the one that stays within a process.

Rules of every transport: frames arrive whole, in order, each once; a peer that has gone is told apart from one that
has nothing to say; what a peer sent before it left can still be read. One thread uses an end.

What is left out: what the bytes mean (`codec`), and which rank the peer is (`link`).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from metrale_ray.baton import Baton
from metrale_ray.errors import FrameError, LinkLost
from metrale_ray.protocol.limits import MAX_FRAME_BYTES


class Transport(Protocol):
    """One end of a connection to one peer."""

    def send(self, data: bytes) -> None:
        """Send one frame. Raises LinkLost, and FrameError for a frame above MAX_FRAME_BYTES."""
        ...

    def receive(self, timeout_s: float | None) -> bytes:
        """The next frame. Raises LinkLost when the peer has gone and all it sent has been read, TimeoutError after
        `timeout_s` seconds; None waits without limit, and 0 only looks."""
        ...

    def lost(self) -> str | None:
        """Why the peer has gone, or None while it has not. Never waits."""
        ...

    def close(self) -> None:
        """Leave. What was sent before still arrives. Closing twice does nothing."""
        ...


class Listening(Transport, Protocol):
    """An end that waits for its one peer to come."""

    @property
    def address(self) -> str:
        """Where the peer connects to."""
        ...

    @property
    def num_refused(self) -> int:
        """Strangers who were turned away. From any thread."""
        ...


def check_frame_size(data: bytes) -> None:
    """Raise FrameError for a frame that no peer would take."""
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame has at most {MAX_FRAME_BYTES} bytes", num_bytes=len(data))


class MemoryTransport:
    """One end of a pair in one process. Waiting gives the baton away, so a seed gives the order of events."""

    def __init__(self, baton: Baton, peer_name: str) -> None:
        self._baton = baton
        self._peer_name = peer_name
        self._inbox: deque[bytes] = deque()
        self._peer: MemoryTransport | None = None
        self._closed = False

    def send(self, data: bytes) -> None:
        """See Transport."""
        check_frame_size(data)
        reason = self.lost()
        if reason is not None or self._peer is None:
            raise LinkLost(reason or f"{self._peer_name} was never connected")
        self._peer._inbox.append(bytes(data))

    def receive(self, timeout_s: float | None) -> bytes:
        """See Transport. Seconds are the baton's virtual ones."""
        if not self._has_news() and timeout_s != 0:
            self._baton.wait_until(self._has_news, timeout_s, f"a frame from {self._peer_name}")
        if self._inbox and not self._closed:
            return self._inbox.popleft()
        reason = self.lost()
        if reason is not None:
            raise LinkLost(reason)
        raise TimeoutError(f"nothing came from {self._peer_name} within {timeout_s} s")

    def lost(self) -> str | None:
        """See Transport."""
        if self._closed:
            return f"the connection to {self._peer_name} was closed on this side"
        if self._peer is not None and self._peer._closed:
            return f"{self._peer_name} has closed the connection"
        return None

    def close(self) -> None:
        """See Transport."""
        self._closed = True

    def _has_news(self) -> bool:
        return bool(self._inbox) or self.lost() is not None


def memory_pair(baton: Baton, a: str, b: str) -> tuple[MemoryTransport, MemoryTransport]:
    """The end that `a` holds and the end that `b` holds. The names are for messages."""
    end_a, end_b = MemoryTransport(baton, b), MemoryTransport(baton, a)
    end_a._peer, end_b._peer = end_b, end_a
    return end_a, end_b
