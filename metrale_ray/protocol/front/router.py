# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FrontRouter`: the head's one socket for all fronts, on the head's event loop, and the door before it.

Only fronts whose public key was allowed come in, and all they say is encrypted (CURVE). Whoever else connects is
dropped before anything of theirs is read: at once when the key is unknown or there is none, and after
HANDSHAKE_TIMEOUT_MS when they say nothing.

What it leaves out: sessions, and what the frames mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq
import zmq.asyncio

from metrale_ray.errors import ConfigError, StartError
from metrale_ray.protocol.door import Door
from metrale_ray.protocol.keys import CURVE_FRAME_BYTES, KeyPair, listen_with
from metrale_ray.protocol.limits import MAX_FRAME_BYTES
from metrale_ray.protocol.zmq_transport import HANDSHAKE_TIMEOUT_MS, unbounded_monitor

LINGER_MS = 500
"""How long a last word may take to leave after the socket was closed."""

RECEIVE_FRAMES = 64
"""Frames of one front that wait here unread; more wait at the front. So what a front says of its reading does not
stand behind a thousand of its long prompts."""

_EVERYWHERE = ("", "*", "0.0.0.0", "::", "[::]")
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # unknown keys: see the door
_CANNOT_TAKE = (zmq.EAGAIN, zmq.EHOSTUNREACH)


IsAllowed = Callable[[bytes], bool]
"""Whether the front with this public key (32 bytes) may come in."""


class Part(Protocol):
    """One part of a message. `get("User-Id")`: the public key that its connection has shown, in hexadecimal."""

    @property
    def bytes(self) -> bytes: ...

    def get(self, name: str, /) -> Any: ...


class Router(Protocol):
    """The head's end of all fronts' connections. All methods belong to one event loop."""

    @property
    def num_refused(self) -> int:
        """Connections that showed no allowed key. From any thread."""
        ...

    async def listen(self, send_frames: int, beat_s: float, silence_s: float) -> str:
        """The address where fronts connect. `send_frames` may wait to leave for each front. Raises StartError."""
        ...

    async def receive(self) -> Sequence[Part]:
        """The parts of the next message: the connection's name, then what was said."""
        ...

    async def count_refusals(self) -> None:
        """Count the connections that failed, until cancelled."""
        ...

    def send(self, identity: bytes, data: bytes) -> bool:
        """Whether the frame was taken. False: the front has gone or takes nothing. Never waits."""
        ...

    async def close(self) -> None:
        """Leave, once a last word had its time to go."""
        ...


class FrontRouter:
    """Listens on `host`, the numeric address of one interface, on a port that the system chooses.

    All methods belong to one event loop. Raises ConfigError for a host that means all interfaces.
    """

    def __init__(self, host: str, keys: KeyPair, is_allowed: IsAllowed) -> None:
        if host in _EVERYWHERE:
            raise ConfigError(f"host is {host!r}, which is every interface; give the address of one, as 127.0.0.1")
        self._host = host
        self._keys = keys
        self._is_allowed = is_allowed
        self._num_refused = 0  # but for those that the door turned away
        self._door: Door | None = None
        self._socket: Any = None
        self._monitor: Any = None

    @property
    def num_refused(self) -> int:
        """Connections that showed no allowed key. From any thread."""
        return self._num_refused + (self._door.num_refused if self._door is not None else 0)

    async def listen(self, send_frames: int, beat_s: float, silence_s: float) -> str:
        """The address, as tcp://host:port. `send_frames` may wait to leave for each front. Raises StartError."""
        context = zmq.asyncio.Context()
        self._door = Door(context, self._is_allowed)
        self._socket = _make_socket(context, send_frames, beat_s, silence_s)
        listen_with(self._socket, self._keys)
        self._monitor = unbounded_monitor(self._socket, _REFUSALS)
        is_ipv6 = ":" in self._host
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        try:
            self._socket.bind(f"tcp://[{self._host}]:*" if is_ipv6 else f"tcp://{self._host}:*")
        except zmq.ZMQError as error:
            await self.close()
            raise StartError(f"cannot listen for fronts on {self._host}: {error.strerror}") from error
        return str(self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii"))

    async def receive(self) -> Sequence[Part]:
        """The parts of the next message: the connection's name, then what was said."""
        parts: list[zmq.Frame] = await self._socket.recv_multipart(copy=False)
        return parts

    async def count_refusals(self) -> None:
        """Count the connections that failed, until cancelled."""
        while True:
            await self._monitor.recv_multipart()
            self._num_refused += 1

    def send(self, identity: bytes, data: bytes) -> bool:
        """Whether the socket took the frame. False: the front has gone or takes nothing. Never waits."""
        # With NOBLOCK the socket tries at once, so the future is done when it is returned.
        error = self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK).exception()
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in _CANNOT_TAKE:
            return False
        raise error

    async def close(self) -> None:
        """Release the socket, once a last word had its time to leave."""
        self._socket.disable_monitor()  # first: a socket whose monitor is read by nobody stops for good
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        if self._door is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._door.end)


def _make_socket(context: Any, send_frames: int, beat_s: float, silence_s: float) -> Any:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a front that has gone is an error, not silence
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, send_frames)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + CURVE_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(beat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(silence_s * 1000)))
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    return socket
