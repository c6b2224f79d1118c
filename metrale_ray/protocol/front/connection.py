# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FrontConnection`: a front's end of the wire, as one daemon thread that alone touches the sockets.

Rules: other threads only put frames into a queue and write one byte to wake the thread. There is no reconnection: a
session ends with its connection, and `on_lost` is called exactly once, with the reason, however it ends. What has
been received is handed over before the loss is told, and silence is judged after everything received was read, so a
process that was stopped for a while does not take its own pause for the head's.
"""

from __future__ import annotations

import contextlib
import logging
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from metrale_ray.errors import FrameError, ProtocolError
from metrale_ray.protocol.front.frames import decode_from_head, encode
from metrale_ray.protocol.front.messages import Beat, Bye, FromHead, Open, Read
from metrale_ray.protocol.keys import CURVE_FRAME_BYTES, KeyPair, call_with, raw_key
from metrale_ray.protocol.limits import MAX_FRAME_BYTES
from metrale_ray.protocol.zmq_transport import NO_RECONNECT_MS

log = logging.getLogger(__name__)

LINGER_MS = 500
"""How long a last word may take to leave after the socket was closed."""

SEND_FRAMES = 64
"""Frames that wait in the socket; more wait in this process's own queue, which what was read goes ahead of."""

JOIN_TIMEOUT_S = 5.0
"""Far above the linger; the thread does nothing else that takes time."""

_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Connection(Protocol):
    """A front's end of its session, whatever carries it."""

    @property
    def heard_at_s(self) -> float:
        """When something of the head was last read (monotonic clock); until then, when this was made."""
        ...

    def start(self) -> None:
        """Begin. Called once."""
        ...

    def send(self, data: bytes) -> None:
        """Queue one frame, from any thread. Frames queued after the end are let go."""
        ...

    def note_read(self, num_frames: int) -> None:
        """Tell the head how many frames were read, before all that is queued. From within `on_message` only."""
        ...

    def stop(self) -> None:
        """Say Bye and end, soon. From any thread; calling it twice is allowed."""
        ...

    def join(self) -> None:
        """Wait for the end, except from within `on_message` and `on_lost`."""
        ...


class Connect(Protocol):
    """Makes a connection to the head at `address`; see FrontConnection."""

    def __call__(
        self,
        address: str,
        keys: KeyPair,
        head_key: str,
        on_message: Callable[[FromHead], None],
        on_lost: Callable[[str], None],
        *,
        beat_s: float,
        silence_s: float,
    ) -> Connection: ...


class FrontConnection:
    """One connection to the head at `address`, whose public key is `head_key`; `keys` are this front's own.

    `on_message` and `on_lost` are called from its thread. Raises StartError for a key that is none.
    """

    def __init__(
        self,
        address: str,
        keys: KeyPair,
        head_key: str,
        on_message: Callable[[FromHead], None],
        on_lost: Callable[[str], None],
        *,
        beat_s: float,
        silence_s: float,
    ) -> None:
        raw_key(head_key)
        self._address = address
        self._keys = keys
        self._head_key = head_key
        self._on_message = on_message
        self._on_lost = on_lost
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._pending: deque[bytes] = deque([encode(Open())])
        self._read: bytes | None = None  # what was read last, if the head has not been told yet
        self._lock = threading.Lock()  # guards the wake socket's life
        self._is_stopping = False
        self._heard_at_s = time.monotonic()
        self._context = zmq.Context()
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="front-connection", daemon=True)

    def start(self) -> None:
        """Start the thread. Called once."""
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Queue one frame, from any thread. Frames queued after the end are let go: nobody is there to read them."""
        self._pending.append(data)
        if threading.current_thread() is not self._thread:
            self._wake()

    def note_read(self, num_frames: int) -> None:
        """Tell the head how many frames were read, before all that is queued. From within `on_message` only."""
        self._read = encode(Read(num_frames))

    @property
    def heard_at_s(self) -> float:
        """When something of the head was last read (monotonic clock); until then, when this was made."""
        return self._heard_at_s

    def stop(self) -> None:
        """Say Bye and end, soon. From any thread; calling it twice is allowed."""
        self._is_stopping = True
        self._wake()

    def join(self) -> None:
        """Wait for the thread's end, except from the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_out.fileno() < 0:
                return
            with contextlib.suppress(BlockingIOError):  # full of bytes that wake it: nothing to add
                self._wake_out.send(b"\0")

    def _run(self) -> None:
        reason = "the front's connection failed"
        try:
            reason = self._converse()
        except (ProtocolError, zmq.ZMQError) as error:
            reason = f"the session with the head at {self._address} failed: {error}"
        finally:
            with self._lock:
                self._wake_out.close()
                self._wake_in.close()
            self._on_lost(reason)
            self._context.destroy(linger=LINGER_MS)

    def _converse(self) -> str:
        """Connect, and send and receive until the session ends; the reason why it did."""
        with _make_socket(self._context, self._beat_s, self._silence_s) as socket:
            call_with(socket, self._keys, self._head_key)
            socket.setsockopt(zmq.IPV6, int("[" in self._address))
            with socket.get_monitor_socket(_LOST_EVENTS) as monitor:
                try:
                    socket.connect(self._address)
                    return self._loop(socket, monitor)
                finally:
                    socket.disable_monitor()

    def _loop(self, socket: Any, monitor: Any) -> str:
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        beat_at = self._heard_at_s = time.monotonic()
        while not self._is_stopping:
            if time.monotonic() >= beat_at:
                self._pending.append(encode(Beat()))
                beat_at = time.monotonic() + self._beat_s
            poller.register(socket, zmq.POLLIN if self._flush(socket) else zmq.POLLIN | zmq.POLLOUT)
            deadline = min(beat_at, self._heard_at_s + self._silence_s)
            events = dict(poller.poll(max(0, round((deadline - time.monotonic()) * 1000) + 1)))
            if self._wake_in.fileno() in events:
                self._wake_in.recv(4096)
            self._receive(socket)
            if monitor in events:
                return f"the connection to the head at {self._address} was lost ({_event_name(monitor)})"
            if time.monotonic() >= self._heard_at_s + self._silence_s:
                return f"nothing was heard of the head at {self._address} for {self._silence_s:g} s"
        self._pending.append(encode(Bye()))
        self._flush(socket)
        return "this front was closed"

    def _flush(self, socket: Any) -> bool:
        """Send what is queued, but not for long, as there may be something to read; whether all of it left."""
        try:
            if self._read is not None:
                socket.send(self._read, zmq.NOBLOCK)
                self._read = None
            for _ in range(SEND_FRAMES):
                if not self._pending:
                    break
                socket.send(self._pending[0], zmq.NOBLOCK)
                self._pending.popleft()
        except zmq.Again:
            return False
        return not self._pending

    def _receive(self, socket: Any) -> None:
        """Hand over everything that has arrived."""
        while not self._is_stopping:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                raise FrameError(f"a message is one frame, not {len(frames)}", num_bytes=sum(map(len, frames)))
            self._heard_at_s = time.monotonic()
            self._on_message(decode_from_head(frames[0]))


def _make_socket(context: Any, beat_s: float, silence_s: float) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, NO_RECONNECT_MS)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, SEND_FRAMES)
    socket.setsockopt(zmq.RCVHWM, 1024)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + CURVE_FRAME_BYTES)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, round(silence_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(beat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(silence_s * 1000)))
    return socket


def _event_name(monitor: Any) -> str:
    return str(zmq.Event(recv_monitor_message(monitor)["event"]).name).lower()
