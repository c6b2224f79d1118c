# SPDX-License-Identifier: MIT OR Apache-2.0
"""100,000 random and damaged frames at each end of a front's session.

At the head's end the bad front is dropped alone and told so once, and another front's session goes on. At the front's
end a frame is taken, or ends the session with the reason. There are no sockets here.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import Any

import pytest

from metrale_ray.errors import FrameError, SessionError
from metrale_ray.protocol.front import client as client_module
from metrale_ray.protocol.front.client import FrontClient
from metrale_ray.protocol.front.frames import decode_from_front, decode_from_head, encode
from metrale_ray.protocol.front.handle import RequestHandle
from metrale_ray.protocol.front.messages import (
    Abort,
    Beat,
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
from metrale_ray.protocol.front.server import FrontId, FrontServer
from metrale_ray.protocol.keys import new_keys, raw_key
from metrale_ray.sampling.token_params import TokenParams
from tests.protocol.front_samples import FROM_FRONT, FROM_HEAD
from tests.protocol.fuzzing import NUM_FRAMES, Tally, run_frames, steady_memory
from tests.protocol.mutations import Mutator
from tests.protocol.samples import golden_messages, to_bytes

BAD, GOOD = b"bad", b"good"  # the socket's names for the two connections
OTHERS = [to_bytes(message, 2) for message in golden_messages(2).values()]
OPENED = Opened(max_model_len=128, vocab_size=320, engine_epoch=3)
KEYS = new_keys()
USER_ID = raw_key(KEYS.public).hex()
OPEN = encode(Open())
NUM_SERVED = 30_000  # of the frames of a front: those that a whole server gets
PER_TURN = 1000  # frames, before the loop's other work gets its turn


class Part:
    """One part of a message that a socket received."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def get(self, name: str) -> str:
        assert name == "User-Id"
        return USER_ID


class Router:
    """Takes what is sent and keeps the last frame for each connection."""

    num_refused = 0

    def __init__(self) -> None:
        self.last: dict[bytes, bytes] = {}

    def send(self, identity: bytes, data: bytes) -> bool:
        self.last[identity] = data
        return True


class Head:
    """A front server with two fronts; only the bad one is fuzzed."""

    def __init__(self) -> None:
        self.messages: list[tuple[FrontId, Submit | Abort | Finish]] = []
        self.gone: list[FrontId] = []
        self.num_dropped = 0
        self.server = FrontServer("127.0.0.1", self.on_message, self.gone.append, lambda: OPENED, KEYS)
        self.server.allow(KEYS.public)
        self.router: Any = Router()
        self.server._router = self.router
        for name in (GOOD, BAD):
            self.say(name, OPEN)
        self.good_id = self.server._sessions[GOOD].front_id

    def on_message(self, front_id: FrontId, message: Submit | Abort | Finish) -> None:
        self.messages.append((front_id, message))

    def say(self, name: bytes, data: bytes) -> None:
        self.server._take([Part(name), Part(data)])  # type: ignore[list-item]

    def read(self, data: bytes) -> str:
        """What the bad front's frame did. Raises what its bytes are refused with."""
        self.messages.clear()
        session, num_refused = self.server._sessions[BAD], self.server.num_refused
        num_sent = session.outbox.num_sent
        self.say(BAD, data)
        is_refused = self.server.num_refused > num_refused
        if BAD not in self.server._sessions:
            self.num_dropped += 1
            self.check_dropped(session.front_id, is_refused)
            self.say(BAD, OPEN)
        self.check_good()
        message = decode_from_front(data)
        self.check_effect(message, session.front_id, is_refused, num_sent)
        if is_refused:
            raise SessionError("refused by the session")
        return type(message).__name__

    def check_dropped(self, front_id: FrontId, is_refused: bool) -> None:
        """It gets nothing more, and was told why unless it said Bye."""
        assert front_id not in self.server._front_ids
        assert not self.messages
        if is_refused:
            last = decode_from_head(self.router.last[BAD])
            assert isinstance(last, Dead)
            assert last.reason.startswith("the head dropped this front: ")

    def check_effect(self, message: FromFront, front_id: FrontId, is_refused: bool, num_sent: int) -> None:
        """A request reaches the head whole, in the name of its front; nothing else does."""
        wanted = [(front_id, message)] if isinstance(message, Submit | Abort | Finish) else []
        assert self.messages == wanted
        refusable = isinstance(message, Open) or (isinstance(message, Read) and message.num_frames > num_sent)
        assert is_refused == refusable

    def check_good(self) -> None:
        """The other front's session is what it was."""
        assert self.server._sessions[GOOD].front_id == self.good_id
        assert self.server.num_fronts == 2


def fronts_mutator(seed: int) -> Mutator:
    # Submits have many fields, so they come more often.
    valid = [encode(m) for m in (*FROM_FRONT, *(m for m in FROM_FRONT if isinstance(m, Submit)))]
    return Mutator(seed, valid, OTHERS + [encode(m) for m in FROM_HEAD])


def test_a_fronts_frame_is_a_message_that_can_be_sent_again_or_is_refused(scale: int) -> None:
    seed, num_frames = 5001, (NUM_FRAMES - NUM_SERVED) * scale
    mutator = fronts_mutator(seed)

    def read(data: bytes) -> str:
        message = decode_from_front(data)
        assert decode_from_front(encode(message)) == message
        return type(message).__name__

    with steady_memory():
        frames = (mutator.next() for _ in range(num_frames))
        tally = run_frames("head, of a front", seed, frames, read, (FrameError,))
    assert tally.num_frames == num_frames
    assert tally.num_messages > num_frames // 9
    assert set(tally.messages) == {type(m).__name__ for m in FROM_FRONT}
    assert min(tally.messages.values()) > num_frames // 250
    assert tally.refusals["FrameError"] > num_frames // 4


def test_a_fronts_frame_is_taken_whole_or_ends_that_front_alone(caplog: pytest.LogCaptureFixture, scale: int) -> None:
    caplog.set_level(logging.ERROR, "metrale_ray.protocol.front.server")  # a line for each dropped front
    seed, num_frames, tally = 5002, NUM_SERVED * scale, Tally()
    mutator = fronts_mutator(seed)
    frames = (mutator.next() for _ in range(num_frames))

    async def serve() -> Head:
        head = Head()
        while tally.num_frames < num_frames:
            turn = islice(frames, PER_TURN)
            run_frames("head, of a front", seed, turn, head.read, (FrameError, SessionError), tally=tally)
            head.server.post(head.good_id, [Output(1, 0, (tally.num_frames,))])
            head.server._flush(head.server._sessions[GOOD])  # as the loop of a server that was started does
            good = decode_from_head(head.router.last[GOOD])
            assert isinstance(good, Outputs)
            assert good.outputs[0].token_ids == (tally.num_frames,)
            head.say(GOOD, encode(Read(good.number)))
            await asyncio.sleep(0)
        return head

    with steady_memory():
        head = asyncio.run(serve())
    assert tally.num_frames == num_frames
    assert head.num_dropped == len(head.gone) == len(set(head.gone))
    assert head.good_id not in head.gone
    assert tally.num_messages > num_frames // 9
    assert set(tally.messages) == {type(m).__name__ for m in FROM_FRONT} - {"Open"}  # a second one is refused
    assert min(tally.messages.values()) > num_frames // 250
    assert tally.refusals["SessionError"] > num_frames // 100


class Silent:
    """A connection to nobody: what is sent is counted, and nothing comes."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        self.num_sent = self.num_read = 0
        self.has_stopped = False

    def start(self) -> None:
        """Nothing runs."""

    def send(self, data: bytes) -> None:
        self.num_sent += 1

    def note_read(self, num_frames: int) -> None:
        self.num_read = num_frames

    def stop(self) -> None:
        self.has_stopped = True

    def join(self) -> None:
        """Nothing ran."""


class Front:
    """A client with two requests open, which has read nothing yet."""

    def __init__(self) -> None:
        self.client = FrontClient("tcp://127.0.0.1:1", KEYS, KEYS.public, connect=Silent)
        self.handles: list[RequestHandle] = [self.client.submit([1], TokenParams(n=n)) for n in (1, 3)]

    def is_fresh(self) -> bool:
        return self.client.death is None and self.client._num_frames == 0 and self.client._opened is None


def test_a_heads_frame_is_taken_whole_or_ends_the_session(monkeypatch: pytest.MonkeyPatch, scale: int) -> None:
    monkeypatch.setattr(client_module, "_encode_submit", lambda submit, params: b"")  # nobody reads it
    seed, num_frames = 5003, NUM_FRAMES * scale
    valid = [encode(m) for m in (*FROM_HEAD, *(m for m in FROM_HEAD if isinstance(m, Outputs)))]
    mutator = Mutator(seed, valid, OTHERS + [encode(m) for m in FROM_FRONT])
    front = Front()

    def read(data: bytes) -> str:
        nonlocal front
        message = decode_from_head(data)
        assert decode_from_head(encode(message)) == message
        try:
            front.client._take(message)
        except SessionError:
            assert isinstance(message, Outputs)
            assert message.number != 1
            assert front.is_fresh()
            assert not any(handle._outputs for handle in front.handles)
            raise
        check_taken(front, message)
        if not isinstance(message, Beat):
            front = Front()
        return type(message).__name__

    with steady_memory():
        frames = (mutator.next() for _ in range(num_frames))
        tally = run_frames("front", seed, frames, read, (FrameError, SessionError))
    assert tally.num_frames == num_frames
    assert tally.num_messages > num_frames // 9
    assert set(tally.messages) == {type(m).__name__ for m in FROM_HEAD}
    assert min(tally.messages.values()) > num_frames // 250
    assert tally.refusals["SessionError"] > num_frames // 50
    assert tally.refusals["FrameError"] > num_frames // 4


def check_taken(front: Front, message: Any) -> None:
    """Each handle has its own outputs, in order, up to its end, and nothing of another's."""
    client = front.client
    for handle in front.handles:
        mine = message.outputs if isinstance(message, Outputs) else ()
        mine = [output for output in mine if output.request_id == handle.request_id]
        rest = iter(mine)
        assert all(output in rest for output in handle._outputs)  # some of mine, in their order
        assert (handle.request_id in client._handles) == (bool(handle._live) and not isinstance(message, Dead))
    match message:
        case Dead(reason, rank):
            assert client.death is not None
            assert (client.death.message, client.death.rank) == (reason, rank)
            assert client._connection.has_stopped  # type: ignore[attr-defined]
        case Opened():
            assert client.wait_opened(0) == message
        case Outputs():
            assert client._num_frames == 1
            assert client._connection.num_sent == 2  # type: ignore[attr-defined]  # the requests
            assert client._connection.num_read == 1  # type: ignore[attr-defined]
        case _:
            assert front.is_fresh()


def test_neither_side_takes_what_only_the_other_says() -> None:
    for said, decode in ((FROM_HEAD, decode_from_front), (FROM_FRONT, decode_from_head)):
        for message in said:
            if not isinstance(message, Beat):
                with pytest.raises(FrameError, match="no message that this side may send"):
                    decode(encode(message))
