# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FrontServer`: the head's end of every front's session, on the head's event loop.

Rules: nothing here blocks the loop or the engine. All that one turn of the loop posts to a front goes out together. A
front that does not read has its outputs held for it (`outbox`), and is dropped, never waited for, once they are too
many or wait too long, and when it has gone or was silent for too long. A front that says what the protocol does not
allow is dropped alone, logged and counted. Each dropped front is told why where it can be told, and `on_gone` is called
for it exactly once, from the loop and never from inside `post`.

Silence is counted in this side's own beats, so a loop that was held up does not take its fronts for silent.

What it leaves out: what a request means. `on_message` gets it whole and checked. A SessionError of it is the front's
fault, which is dropped; if it raises anything else the server fails as a whole: fronts are told, see `wait_failed`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NewType

from metrale_ray.clock import Clock
from metrale_ray.errors import FrameError, ProtocolError, SessionError
from metrale_ray.protocol.front.allowed_keys import MAX_FRONTS, AllowedKeys
from metrale_ray.protocol.front.frames import FrontDecoder, encode
from metrale_ray.protocol.front.messages import (
    BEAT_S,
    FRONT_VERSION,
    SILENCE_S,
    Abort,
    Ask,
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
    Told,
)
from metrale_ray.protocol.front.outbox import CREDIT_FRAMES, MAX_HELD_BYTES, Outbox
from metrale_ray.protocol.front.router import FrontRouter, IsAllowed, Part, Router
from metrale_ray.protocol.keys import KeyPair, raw_key

log = logging.getLogger(__name__)

FrontId = NewType("FrontId", int)
"""One session of one front, from 1; never used again."""

TELL_INTERVAL_S = 0.2
"""How often one front is told the figures: what it asks meanwhile is answered together."""

_RECEIVES_PER_TURN = 64  # then the loop's other tasks get a turn, however much one front sends
_ROOM_FOR_WORDS = 64  # frames that the socket takes above a front's credit: beats, figures and the last word
_UNREACHABLE = "it cannot be reached any more"


def _no_figures() -> str:
    return "{}"


@dataclass(slots=True)
class _Session:
    front_id: FrontId
    identity: bytes  # the socket's name for the connection
    key: bytes  # the front's own, 32 bytes
    outbox: Outbox
    num_missed_beats: int = 0
    asked: int | None = None  # its last question, while it waits for the answer
    tell_at_s: float = 0.0  # the loop's time from which it may be told the figures again


class FrontServer:
    """The sessions of all fronts. All methods but `__init__` belong to the loop that ran `start`.

    A key that was let in by `allow` is good while it has a session and for 10 minutes after, so that fronts that come
    and go leave none behind; a lasting one stays good. See `AllowedKeys` for the rule and its bound.
    """

    def __init__(
        self,
        host: str,
        on_message: Callable[[FrontId, Submit | Abort | Finish], None],
        on_gone: Callable[[FrontId], None],
        opened: Callable[[], Opened],
        keys: KeyPair,
        *,
        figures: Callable[[], str] = _no_figures,
        make_router: Callable[[IsAllowed], Router] | None = None,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        credit: int = CREDIT_FRAMES,
        max_held_bytes: int = MAX_HELD_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        """`host` is the numeric address of one interface, `keys` are the head's. `figures` gives the text of `Told`.
        `make_router` makes the way to the fronts; None: a socket on `host`. `clock` says how long a key was not used.

        Raises ConfigError for a host that means all interfaces.
        """
        self._allowed = AllowedKeys(clock=clock)
        is_allowed = self._allowed.is_allowed
        self._router = FrontRouter(host, keys, is_allowed) if make_router is None else make_router(is_allowed)
        self._decoder = FrontDecoder()
        self._on_message = on_message
        self._on_gone = on_gone
        self._opened = opened
        self._figures = figures
        self._beat_s = beat_s
        self._max_missed_beats = max(1, math.ceil(silence_s / beat_s))
        self._credit = credit
        self._max_held_bytes = max_held_bytes
        self._sessions: dict[bytes, _Session] = {}
        self._front_ids: dict[FrontId, _Session] = {}
        self._next_ids = itertools.count(1)
        self._num_refused = 0
        self._posted: dict[FrontId, _Session] = {}  # with outputs that were not tried yet
        self._has_posted = asyncio.Event()
        self._dead: Dead | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._address: str | None = None
        self._failure: Exception | None = None
        self._has_failed = asyncio.Event()

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
        return self._num_refused + self._router.num_refused

    @property
    def num_fronts(self) -> int:
        """Sessions that are open now."""
        return len(self._sessions)

    @property
    def failure(self) -> Exception | None:
        """What made the server fail as a whole, or None."""
        return self._failure

    async def wait_failed(self) -> Exception:
        """Wait until the server fails as a whole, which may be for ever, and give the reason."""
        await self._has_failed.wait()
        assert self._failure is not None  # set before
        return self._failure

    def allow(self, public_key: str, *, is_lasting: bool = False) -> None:
        """Let the front with this key come in from now on, for good if it is lasting.

        Raises StartError for a key that is none.
        """
        self._allowed.allow(raw_key(public_key), is_lasting=is_lasting)

    def disallow(self, public_key: str) -> None:
        """Let it in no longer, and drop the sessions that it has. Raises StartError for a key that is none."""
        key = raw_key(public_key)
        self._allowed.disallow(key)
        for session in [session for session in self._sessions.values() if session.key == key]:
            self._drop(session, "its key is not allowed any more")

    async def start(self) -> None:
        """Listen, on a port that the system chooses. Raises StartError when the address cannot be listened on."""
        silence_s = self._beat_s * self._max_missed_beats
        self._address = await self._router.listen(self._credit + _ROOM_FOR_WORDS, self._beat_s, silence_s)
        works = (self._receive(), self._router.count_refusals(), self._beat(), self._flush_posted())
        self._tasks = [asyncio.create_task(self._watched(work)) for work in works]

    def post(self, front_id: FrontId, outputs: Sequence[Output]) -> None:
        """Send outputs to a front, soon and in as few frames as they fit in, in order. Never blocks.

        A front that has gone already is no error: `on_gone` has told of it, or is about to.
        """
        session = self._front_ids.get(front_id)
        if session is not None and outputs:
            session.outbox.add(outputs)
            self._posted[front_id] = session
            self._has_posted.set()

    def drop(self, front_id: FrontId, reason: str) -> None:
        """End the session of a front that did what no front may do. One that has gone already is no error."""
        session = self._front_ids.get(front_id)
        if session is not None:
            self._num_refused += 1
            self._drop(session, reason)

    def post_dead(self, reason: str, rank: int | None = None) -> None:
        """Tell every front, and every later one, that the engine has ended. `on_gone` is not called for them.

        What was posted before goes first, as far as the front has read.
        """
        if self._dead is None:
            self._dead = Dead(reason, rank)
        for session in list(self._sessions.values()):
            self._flush(session)
            if session.identity in self._sessions:
                self._forget(session)
                self._router.send(session.identity, encode(self._dead))

    async def close(self) -> None:
        """Tell every front that it is over, and release the socket. A second time does nothing."""
        if self._address is None or not self._tasks:
            return
        self.post_dead("the engine was stopped")
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._router.close()

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # whatever it is, fronts are told and `wait_failed` gives it
            log.exception("the front server failed")
            self._failure = self._failure or error
            self._has_failed.set()
            self.post_dead(f"the front server failed: {error}")

    async def _receive(self) -> None:
        while True:
            for _ in range(_RECEIVES_PER_TURN):
                self._take(await self._router.receive())
            await asyncio.sleep(0)

    async def _flush_posted(self) -> None:
        while True:
            await self._has_posted.wait()
            self._has_posted.clear()
            posted, self._posted = self._posted, {}
            for front_id, session in posted.items():
                if front_id in self._front_ids:
                    self._flush(session)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            for session in list(self._sessions.values()):
                self._beat_one(session)

    def _beat_one(self, session: _Session) -> None:
        silence_s = self._beat_s * self._max_missed_beats
        session.num_missed_beats += 1
        if session.num_missed_beats > self._max_missed_beats:
            self._drop(session, f"it was silent for {silence_s:g} s")
        elif session.outbox.beat(self._max_missed_beats):
            self._drop(session, f"it read nothing for {silence_s:g} s, while outputs waited for it")
        elif not self._router.send(session.identity, encode(Beat())):
            self._drop(session, _UNREACHABLE)

    def _take(self, parts: Sequence[Part]) -> None:
        identity, *frames = (part.bytes for part in parts)
        try:
            if len(frames) != 1:
                raise FrameError(f"a message is one frame, not {len(frames)}", num_bytes=sum(map(len, frames)))
            self._handle(identity, parts[1], self._decoder.decode(frames[0]))
        except ProtocolError as error:
            self._refuse(identity, error)

    def _handle(self, identity: bytes, frame: Part, message: FromFront) -> None:
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
                session.outbox.read(num_frames)
                self._flush(session)
            case Ask(number):
                self._hear_question(session, number)
            case Bye():
                self._drop(session, None)
            case Beat():
                pass

    def _open(self, identity: bytes, key: bytes, session: _Session | None, message: Open) -> None:
        if session is not None:
            raise SessionError("a front may say Open once")
        if not self._allowed.is_allowed(key):
            raise SessionError("this front's key is not allowed any more")
        if message.version != FRONT_VERSION:
            raise SessionError(f"this front speaks version {message.version}; the head speaks {FRONT_VERSION}")
        if self._dead is not None:
            self._router.send(identity, encode(self._dead))
            return
        if len(self._sessions) >= MAX_FRONTS:
            raise SessionError(f"the head has {MAX_FRONTS} fronts already, which is the limit")
        outbox = Outbox(self._credit, max_held_bytes=self._max_held_bytes)
        session = _Session(FrontId(next(self._next_ids)), identity, key, outbox)
        self._sessions[identity] = self._front_ids[session.front_id] = session
        self._allowed.opened(key)
        log.info("front %d opened a session", session.front_id)
        if not self._router.send(identity, encode(self._opened())):
            self._drop(session, _UNREACHABLE)

    def _hear_question(self, session: _Session, number: int) -> None:
        """Answer it soon, together with what this front asks until then."""
        if session.asked is None:
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), session.tell_at_s), self._tell, session)
        session.asked = number

    def _tell(self, session: _Session) -> None:
        number, session.asked = session.asked, None
        if number is None or session.front_id not in self._front_ids:
            return
        session.tell_at_s = asyncio.get_running_loop().time() + TELL_INTERVAL_S
        # Whether it takes the answer does not matter: one that takes nothing for long is dropped at a beat.
        self._router.send(session.identity, encode(Told(number, self._figures())))

    def _refuse(self, identity: bytes, error: ProtocolError) -> None:
        self._num_refused += 1
        session = self._sessions.get(identity)
        if session is not None:
            self._drop(session, str(error))
            return
        # No session, so no log line either: a stranger must not be able to fill the log.
        log.debug("refused a frame of a stranger: %s", error)
        self._router.send(identity, encode(Dead(f"the head refused this front: {error}")))

    def _flush(self, session: _Session) -> None:
        """Send what the front has credit for; drop it if that cannot be sent, or if too much is left."""
        outbox = session.outbox
        while outputs := outbox.next_frame():
            try:
                data = encode(Outputs(outbox.num_sent + 1, outputs))
            except FrameError as error:
                self._drop(session, f"its outputs do not make a frame: {error}")
                return
            if not self._router.send(session.identity, data):
                self._drop(session, _UNREACHABLE)
                return
            outbox.sent(len(data))
        overflow = outbox.overflow()
        if overflow is not None:
            self._drop(session, overflow)

    def _drop(self, session: _Session, reason: str | None) -> None:
        """End a session, for a reason, or for none when the front left by itself."""
        self._forget(session)
        if reason is None:
            log.info("front %d left", session.front_id)
        else:
            log.warning("front %d is dropped: %s", session.front_id, reason)
            self._router.send(session.identity, encode(Dead(f"the head dropped this front: {reason}")))
        asyncio.get_running_loop().call_soon(self._on_gone, session.front_id)

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.identity]
        del self._front_ids[session.front_id]
        self._allowed.ended(session.key)


def _key_of(frame: Part) -> bytes:
    """The key that the connection of `frame` has shown at the door."""
    return bytes.fromhex(str(frame.get("User-Id")))
