# SPDX-License-Identifier: MIT OR Apache-2.0
"""The two ends of a link between the head and a worker, over the simulated network. See `protocol.transport`.

Rules: sending and receiving are hand-overs, so a process may be stopped or killed before each frame. They keep the
limits of the real transport: how long a send waits for a peer that has not come, and its heartbeat.
"""

from __future__ import annotations

from metrale_ray.baton import Baton
from metrale_ray.errors import LinkLost
from metrale_ray.protocol.transport import check_frame_size
from metrale_ray.protocol.zmq_transport import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS, SEND_TIMEOUT_S
from tests.simulation.end import End, Heartbeat

LINK_HEARTBEAT = Heartbeat((HEARTBEAT_TIMEOUT_MS / 1000, (HEARTBEAT_INTERVAL_MS + HEARTBEAT_TIMEOUT_MS) / 1000))


class SimTransport:
    """The calling end, or with `end` None the listening one before its peer has come."""

    def __init__(self, baton: Baton, peer_name: str, end: End | None, address: str = "", peer_key: str = "") -> None:
        self.address = address
        self.num_refused = 0
        self._baton = baton
        self._peer_name = peer_name
        self._peer_key = peer_key
        self._end = end
        self._is_closed = False

    def accept(self, end: End, key: str) -> str | None:
        """The network's question at the listening end: only the one peer may come, and once."""
        if key != self._peer_key or self._end is not None or self._is_closed:
            self.num_refused += 1
            return "it does not know this process's key, which is of another start or another engine"
        self._end = end
        return None

    def send(self, data: bytes) -> None:
        """See Transport."""
        check_frame_size(data)
        what = f"room to send to {self._peer_name}"
        if not self._baton.wait_until(self._can_send, SEND_TIMEOUT_S, what):
            raise LinkLost(f"{self._peer_name} took nothing for {SEND_TIMEOUT_S:g} s")
        reason = self.lost()
        if reason is not None or self._end is None:
            raise LinkLost(reason or f"{self._peer_name} has not come")
        self._end.send(bytes(data))

    def receive(self, timeout_s: float | None) -> bytes:
        """See Transport."""
        if timeout_s != 0:
            self._baton.wait_until(self._has_news, timeout_s, f"a frame from {self._peer_name}")
        if self._end is not None and self._end.frames and not self._is_closed:
            return self._end.frames.popleft()
        reason = self.lost()
        if reason is not None:
            raise LinkLost(reason)
        raise TimeoutError(f"nothing came from {self._peer_name} within {timeout_s} s")

    def lost(self) -> str | None:
        """See Transport."""
        if self._is_closed:
            return f"the connection to {self._peer_name} was closed on this side"
        return None if self._end is None else self._end.lost

    def close(self) -> None:
        """See Transport."""
        self._is_closed = True
        if self._end is not None:
            self._end.close()

    def _has_news(self) -> bool:
        return (self._end is not None and bool(self._end.frames)) or self.lost() is not None

    def _can_send(self) -> bool:
        return self._end is not None or self._is_closed
