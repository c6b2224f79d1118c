# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FrontServer`: the head's end of every front's session, on the head's event loop.

Rules: nothing here blocks the loop or the engine. A front that cannot take what is posted to it is dropped, never
waited for: it has `credit` frames unread, or it has gone, or it was silent for too long. A front that says what the
protocol does not allow is dropped alone, logged and counted. Each dropped front is told why where it can be told, and
`on_gone` is called for it exactly once, from the loop and never from inside `post`.

Only fronts whose public key was allowed come in, and all they say is encrypted (CURVE). Whoever else connects is
dropped before anything of theirs is read: at once when the key is unknown or there is none, and after
HANDSHAKE_TIMEOUT_MS when they say nothing.

Silence is counted in this side's own beats, so a loop that was held up does not take its fronts for silent.

What it leaves out: what a request means. `on_message` gets it whole and checked; if it raises, the server fails as a
whole: fronts are told, and `close` raises the error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import zmq
import zmq.asyncio

from metrale_ray.errors import ConfigError, FrameError, ProtocolError, SessionError, StartError
from metrale_ray.protocol.door import Door
from metrale_ray.protocol.front.frames import MAX_OUTPUTS, decode_from_front, encode
from metrale_ray.protocol.front.messages import (
    BEAT_S,
    FRONT_VERSION,
    SILENCE_S,
    Abort,
    Beat,
    Bye,
    Dead,
    Finish,
    FromFront,
    Open,
    Opened,
    Output,
    Outputs,
    Read,
    Submit,
)
from metrale_ray.protocol.keys import CURVE_FRAME_BYTES, KeyPair, listen_with, raw_key
from metrale_ray.protocol.limits import MAX_FRAME_BYTES
from metrale_ray.protocol.zmq_transport import HANDSHAKE_TIMEOUT_MS, unbounded_monitor

log = logging.getLogger(__name__)

FrontId = NewType("FrontId", int)
"""One session of one front, from 1; never used again."""

CREDIT_FRAMES = 256
"""Unread frames of a front: some seconds of steps, and few megabytes."""

MAX_FRONTS = 256
"""Sessions at one time: a front is a process, not a user."""

LINGER_MS = 500
"""How long a last word may take to leave after the socket was closed."""

_RECEIVES_PER_TURN = 64  # then the loop's other tasks get a turn, however much one front sends
_EVERYWHERE = ("", "*", "0.0.0.0", "::", "[::]")
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # unknown keys: see the door
_CANNOT_TAKE = (zmq.EAGAIN, zmq.EHOSTUNREACH)


@dataclass(slots=True)
class _Session:
    front_id: FrontId
    identity: bytes  # the socket's name for the connection
    key: bytes  # the front's own, 32 bytes
    num_posted: int = 0
    num_read: int = 0
    num_missed_beats: int = 0


class FrontServer:
    """One ROUTER socket for all fronts. All methods but `__init__` belong to the loop that ran `start`."""

    def __init__(
        self,
        host: str,
        on_message: Callable[[FrontId, Submit | Abort | Finish], None],
        on_gone: Callable[[FrontId], None],
        opened: Callable[[], Opened],
        keys: KeyPair,
        *,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        credit: int = CREDIT_FRAMES,
    ) -> None:
        """`host` is the numeric address of one interface, `keys` are the head's. Raises ConfigError for a host that
        means all interfaces."""
        if host in _EVERYWHERE:
            raise ConfigError(f"host is {host!r}, which is every interface; give the address of one, as 127.0.0.1")
        self._host = host
        self._on_message = on_message
        self._on_gone = on_gone
        self._opened = opened
        self._keys = keys
        self._allowed: set[bytes] = set()
        self._beat_s = beat_s
        self._max_missed_beats = max(1, math.ceil(silence_s / beat_s))
        self._credit = credit
        self._sessions: dict[bytes, _Session] = {}
        self._front_ids: dict[FrontId, _Session] = {}
        self._next_ids = itertools.count(1)
        self._dead: Dead | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._context: Any = None
        self._is_open = False
        self._door: Door | None = None
        self._socket: Any = None
        self._monitor: Any = None
        self._address: str | None = None
        self._num_refused = 0  # but for those that the door turned away

    @property
    def address(self) -> str:
        """Where fronts connect to, as tcp://host:port. Raises SessionError before `start`."""
        if self._address is None:
            raise SessionError("the front server has no address before it is started")
        return self._address

    @property
    def num_refused(self) -> int:
        """Since the start: frames that no front may send, and connections that showed no allowed key.

        What says nothing in ZeroMQ's own words is dropped uncounted. From any thread.
        """
        return self._num_refused + (self._door.num_refused if self._door is not None else 0)

    @property
    def num_fronts(self) -> int:
        """Sessions that are open now."""
        return len(self._sessions)

    def allow(self, public_key: str) -> None:
        """Let the front with this key come in, from now on. Raises StartError for a key that is none."""
        self._allowed.add(raw_key(public_key))

    def disallow(self, public_key: str) -> None:
        """Let it in no longer, and drop the sessions that it has. Raises StartError for a key that is none."""
        key = raw_key(public_key)
        self._allowed.discard(key)
        for session in [session for session in self._sessions.values() if session.key == key]:
            self._drop(session, "its key is not allowed any more")

    async def start(self) -> None:
        """Listen, on a port that the system chooses. Raises StartError when the address cannot be listened on."""
        self._context = zmq.asyncio.Context()
        self._is_open = True
        self._door = Door(self._context, self._allowed.__contains__)
        self._socket = _make_socket(self._context, self._credit, self._beat_s, self._beat_s * self._max_missed_beats)
        listen_with(self._socket, self._keys)
        self._monitor = unbounded_monitor(self._socket, _REFUSALS)
        is_ipv6 = ":" in self._host
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        try:
            self._socket.bind(f"tcp://[{self._host}]:*" if is_ipv6 else f"tcp://{self._host}:*")
        except zmq.ZMQError as error:
            await self._release()
            raise StartError(f"cannot listen for fronts on {self._host}: {error.strerror}") from error
        self._address = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii")
        self._tasks = [
            asyncio.create_task(self._watched(self._receive())),
            asyncio.create_task(self._watched(self._count_refusals())),
            asyncio.create_task(self._watched(self._beat())),
        ]

    def post(self, front_id: FrontId, outputs: Sequence[Output]) -> None:
        """Send one step's outputs to a front: one frame, or several if there are very many. Never blocks.

        A front that has gone already is no error: `on_gone` has told of it, or is about to.
        """
        for start in range(0, len(outputs), MAX_OUTPUTS):
            session = self._front_ids.get(front_id)
            if session is None:
                return
            self._post_frame(session, tuple(outputs[start : start + MAX_OUTPUTS]))

    def post_dead(self, reason: str, rank: int | None = None) -> None:
        """Tell every front, and every later one, that the engine has ended. `on_gone` is not called for them."""
        if self._dead is None:
            self._dead = Dead(reason, rank)
        for session in list(self._sessions.values()):
            self._forget(session)
            self._send(session.identity, encode(self._dead))

    async def close(self) -> None:
        """Tell every front that it is over, and release the socket. Raises what made the server fail, if it did."""
        if not self._is_open:
            return
        self._is_open = False
        self.post_dead("the engine was stopped")
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self._release()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _release(self) -> None:
        self._is_open = False
        self._socket.disable_monitor()  # first: a socket whose monitor is read by nobody stops for good
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        if self._door is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._door.end)

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            log.exception("the front server failed")
            self.post_dead(f"the front server failed: {error}")
            raise

    async def _receive(self) -> None:
        while True:
            for _ in range(_RECEIVES_PER_TURN):
                self._take(await self._socket.recv_multipart(copy=False))
            await asyncio.sleep(0)

    async def _count_refusals(self) -> None:
        while True:
            await self._monitor.recv_multipart()
            self._num_refused += 1

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            for session in list(self._sessions.values()):
                session.num_missed_beats += 1
                if session.num_missed_beats > self._max_missed_beats:
                    self._drop(session, f"it was silent for {self._beat_s * self._max_missed_beats:g} s")
                elif not self._send(session.identity, encode(Beat())):
                    self._drop(session, "it cannot be reached any more")

    def _take(self, parts: list[zmq.Frame]) -> None:
        identity, *frames = (part.bytes for part in parts)
        try:
            if len(frames) != 1:
                raise FrameError(f"a message is one frame, not {len(frames)}", num_bytes=sum(map(len, frames)))
            self._handle(identity, parts[1], decode_from_front(frames[0]))
        except ProtocolError as error:
            self._refuse(identity, error)

    def _handle(self, identity: bytes, frame: zmq.Frame, message: FromFront) -> None:
        session = self._sessions.get(identity)
        if isinstance(message, Open):
            self._open(identity, _key_of(frame), session, message)
            return
        if session is None:
            raise SessionError("a front's first message must be Open")
        session.num_missed_beats = 0
        match message:
            case Submit() | Abort() | Finish():
                self._on_message(session.front_id, message)
            case Read(num_frames):
                _take_read(session, num_frames)
            case Bye():
                self._drop(session, None)
            case Beat():
                pass

    def _open(self, identity: bytes, key: bytes, session: _Session | None, message: Open) -> None:
        if session is not None:
            raise SessionError("a front may say Open once")
        if key not in self._allowed:
            raise SessionError("this front's key is not allowed any more")
        if message.version != FRONT_VERSION:
            raise SessionError(f"this front speaks version {message.version}; the head speaks {FRONT_VERSION}")
        if self._dead is not None:
            self._send(identity, encode(self._dead))
            return
        if len(self._sessions) >= MAX_FRONTS:
            raise SessionError(f"the head has {MAX_FRONTS} fronts already, which is the limit")
        session = _Session(FrontId(next(self._next_ids)), identity, key)
        self._sessions[identity] = self._front_ids[session.front_id] = session
        log.info("front %d opened a session", session.front_id)
        if not self._send(identity, encode(self._opened())):
            self._drop(session, "it cannot be reached any more")

    def _refuse(self, identity: bytes, error: ProtocolError) -> None:
        self._num_refused += 1
        session = self._sessions.get(identity)
        if session is not None:
            self._drop(session, str(error))
            return
        # No session, so no log line either: a stranger must not be able to fill the log.
        log.debug("refused a frame of a stranger: %s", error)
        self._send(identity, encode(Dead(f"the head refused this front: {error}")))

    def _post_frame(self, session: _Session, outputs: tuple[Output, ...]) -> None:
        if session.num_posted - session.num_read >= self._credit:
            self._drop(session, f"it has {self._credit} frames unread, which is the limit")
            return
        if self._send(session.identity, encode(Outputs(session.num_posted + 1, outputs))):
            session.num_posted += 1
        else:
            self._drop(session, "it cannot be reached any more")

    def _drop(self, session: _Session, reason: str | None) -> None:
        """End a session, for a reason, or for none when the front left by itself."""
        self._forget(session)
        if reason is None:
            log.info("front %d left", session.front_id)
        else:
            log.warning("front %d is dropped: %s", session.front_id, reason)
            self._send(session.identity, encode(Dead(f"the head dropped this front: {reason}")))
        asyncio.get_running_loop().call_soon(self._on_gone, session.front_id)

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.identity]
        del self._front_ids[session.front_id]

    def _send(self, identity: bytes, data: bytes) -> bool:
        """Whether the socket took the frame. False: the front has gone or takes nothing."""
        # With NOBLOCK the socket tries at once, so the future is done when it is returned.
        error = self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK).exception()
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno in _CANNOT_TAKE:
            return False
        raise error


def _key_of(frame: zmq.Frame) -> bytes:
    """The key that the connection of `frame` has shown at the door."""
    return bytes.fromhex(str(frame.get("User-Id")))


def _take_read(session: _Session, num_frames: int) -> None:
    if not session.num_read <= num_frames <= session.num_posted:
        raise SessionError(
            f"Read says {num_frames} frames; {session.num_read} were read and {session.num_posted} posted"
        )
    session.num_read = num_frames


def _make_socket(context: Any, credit: int, beat_s: float, silence_s: float) -> Any:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a front that has gone is an error, not silence
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, credit + 64)  # above the credit, and room for beats and the last word
    socket.setsockopt(zmq.RCVHWM, 1024)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + CURVE_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(beat_s * 1000)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(silence_s * 1000)))
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    return socket
