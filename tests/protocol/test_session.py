# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every move that the tables allow leads where they say, and every other one is refused and changes nothing."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from metrale_ray.errors import CommandRefused, HandshakeError, SessionError
from metrale_ray.protocol.codec import decode_command
from metrale_ray.protocol.commands import (
    Cmd,
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    Envelope,
    Load,
    Ping,
    Progress,
    Rank,
    Reply,
    ReplyError,
    Settled,
    Shutdown,
    Status,
    Welcome,
)
from metrale_ray.protocol.session import (
    HEAD_MOVES,
    RANK_MOVES,
    Event,
    HeadSession,
    State,
    WorkerSession,
    check_reply,
    next_state,
)
from tests.protocol.samples import DIGEST, frame, row

WELCOME = Welcome(2, 1, "")
COMMAND_OF = {Event.COMMAND: Ping(), Event.LOAD: Load(8), Event.SHUTDOWN: Shutdown()}


def answer(to: CommandFrame, status: Status = Status.OK, rank: int = 1) -> Reply:
    sent = to.envelope
    progress = Progress(1, 2) if status is Status.PROGRESS else None
    error = ReplyError("command_failed", "x") if status is Status.FAILED else None
    return Reply(
        sent.version, sent.epoch, sent.seq, to.command.code, Rank(rank), status, DIGEST, error=error, progress=progress
    )


class RankSide:
    """A worker's session that is driven by events."""

    def __init__(self) -> None:
        self.session = WorkerSession(2, 1)
        self.seq = 0
        self.frame = frame(2, Ping(), 1)

    def do(self, event: Event) -> None:
        match event:
            case Event.HELLO:
                self.session.hello_sent()
            case Event.WELCOME:
                self.session.welcomed(WELCOME)
            case Event.REFUSAL:
                with pytest.raises(HandshakeError):
                    self.session.welcomed(Welcome(2, 1, "dtype differs"))
            case Event.PROGRESS:
                self.session.replied(answer(self.frame, Status.PROGRESS))
            case Event.REPLY:
                self.session.replied(answer(self.frame))
            case _:
                following = frame(2, COMMAND_OF[event], self.seq + 1)
                self.session.accept(following)
                self.frame, self.seq = following, self.seq + 1


class HeadSide:
    """A head's session that is driven by events."""

    def __init__(self) -> None:
        self.session = HeadSession(2, 1)

    def do(self, event: Event) -> None:
        if event is Event.SETTLE:
            self.session.settle(True)
        else:
            self.session.frame(COMMAND_OF[event])


RANK_EVENTS = sorted({event for _, event in RANK_MOVES}, key=lambda e: e.value)
HEAD_EVENTS = sorted({event for _, event in HEAD_MOVES}, key=lambda e: e.value)
WAY_TO = {
    State.NEW: [],
    State.GREETED: [Event.HELLO],
    State.IDLE: [Event.HELLO, Event.WELCOME],
    State.BUSY: [Event.HELLO, Event.WELCOME, Event.COMMAND],
    State.LOADING: [Event.HELLO, Event.WELCOME, Event.LOAD],
    State.ENDING: [Event.HELLO, Event.WELCOME, Event.SHUTDOWN],
    State.ENDED: [Event.HELLO, Event.WELCOME, Event.SHUTDOWN, Event.REPLY],
}


@pytest.mark.parametrize(("state", "event"), list(product(State, RANK_EVENTS)), ids=lambda value: value.value)
def test_a_rank_makes_exactly_the_moves_of_its_table(state: State, event: Event) -> None:
    side = RankSide()
    for step in WAY_TO[state]:
        side.do(step)
    assert side.session.state is state
    if (state, event) in RANK_MOVES:
        side.do(event)
        assert side.session.state is RANK_MOVES[state, event]
    elif event is Event.REFUSAL:
        with pytest.raises(SessionError):
            side.session.welcomed(Welcome(2, 1, "dtype differs"))
        assert side.session.state is state
    else:
        with pytest.raises(SessionError):
            side.do(event)
        assert side.session.state is state


@pytest.mark.parametrize(
    ("state", "event"),
    list(product((State.IDLE, State.BUSY, State.LOADING, State.ENDING, State.ENDED), HEAD_EVENTS)),
    ids=lambda value: value.value,
)
def test_a_head_makes_exactly_the_moves_of_its_table(state: State, event: Event) -> None:
    side = HeadSide()
    for step in WAY_TO[state][2:]:
        side.do(Event.SETTLE if step is Event.REPLY else step)
    assert side.session.state is state
    if (state, event) in HEAD_MOVES:
        side.do(event)
        assert side.session.state is HEAD_MOVES[state, event]
    else:
        with pytest.raises(SessionError, match="is not allowed while"):
            side.do(event)
        assert side.session.state is state


@pytest.mark.parametrize("moves", [HEAD_MOVES, RANK_MOVES], ids=["head", "rank"])
def test_the_tables_refuse_every_pair_that_they_do_not_hold(moves: dict[tuple[State, Event], State]) -> None:
    for pair in product(State, Event):
        if pair in moves:
            assert next_state(moves, *pair) is moves[pair]
        else:
            with pytest.raises(SessionError, match="is not allowed while"):
                next_state(moves, *pair)


def test_commands_are_numbered_from_1_and_say_how_the_last_one_ended() -> None:
    session = HeadSession(2, 5)
    assert session.last_seq == 0
    first = session.frame(Load(8))
    session.settle(True)
    second = session.frame(Ping())
    session.settle(False)
    third = session.frame(Ping())
    assert [f.envelope for f in (first, second, third)] == [
        Envelope(2, 5, 1, None),
        Envelope(2, 5, 2, Settled(1, True)),
        Envelope(2, 5, 3, Settled(2, False)),
    ]
    assert session.last_seq == 3
    assert decode_command(second.data) == second


def test_a_command_that_is_refused_takes_no_number() -> None:
    session = HeadSession(1, 1)
    for refused in (DecodeBatch((row(),)), Decode(row(3)), Decode(row(tokens=(2**32,)))):
        with pytest.raises(CommandRefused):
            session.frame(refused)
    assert session.last_seq == 0
    assert session.frame(Ping()).envelope.seq == 1


def test_a_reply_of_an_older_epoch_is_refused_as_such() -> None:
    sent = frame(2, Ping(), 1)
    with pytest.raises(SessionError, match="epoch 0, which is over; this is epoch 1"):
        check_reply(sent, dataclasses.replace(answer(sent), epoch=0), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 2}, "epoch 2 instead of 1"),
        ({"seq": 9}, "seq 9 instead of 1"),
        ({"cmd": Cmd.LOAD}, "cmd LOAD instead of PING"),
        ({"rank": Rank(2)}, "rank 2 instead of 1"),
        ({"version": 1}, "version 1 instead of 2"),
        ({"status": Status.PROGRESS}, "only LOAD may"),
    ],
)
def test_a_reply_that_answers_something_else_is_refused(change: dict[str, object], message: str) -> None:
    sent = frame(2, Ping(), 1)
    check_reply(sent, answer(sent), 1)
    wrong = dataclasses.replace(answer(sent), **change)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match=message):
        check_reply(sent, wrong, 1)


def idle_worker(version: int = 2) -> WorkerSession:
    session = WorkerSession(version, 1)
    session.hello_sent()
    session.welcomed(Welcome(version, 1, ""))
    return session


def framed(envelope: Envelope, command: Command | None = None) -> CommandFrame:
    return CommandFrame(envelope, command or Ping(), b"")


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        (Envelope(1, 1, 1, None), "v1 command in a v2 session"),
        (Envelope(2, 2, 1, None), "epoch 2 came in epoch 1"),
        (Envelope(2, 0, 1, None), "epoch 0 came in epoch 1"),
        (Envelope(2, 1, 0, None), "command 0 came after command 0"),
        (Envelope(2, 1, 2, Settled(1, True)), "command 2 came after command 0"),
        (Envelope(2, 1, 1, Settled(0, True)), "settles command 0; it must settle None"),
    ],
)
def test_a_worker_refuses_a_first_command_that_is_not_the_first(envelope: Envelope, message: str) -> None:
    session = idle_worker()
    with pytest.raises(SessionError, match=message):
        session.accept(framed(envelope))
    session.accept(framed(Envelope(2, 1, 1, None)))


@pytest.mark.parametrize("settled", [None, Settled(0, True), Settled(2, True)])
def test_a_worker_refuses_a_later_command_that_does_not_settle_the_one_before(settled: Settled | None) -> None:
    session = idle_worker()
    session.accept(framed(Envelope(2, 1, 1, None)))
    session.replied(answer(framed(Envelope(2, 1, 1, None))))
    with pytest.raises(SessionError, match="it must settle 1"):
        session.accept(framed(Envelope(2, 1, 2, settled)))
    session.accept(framed(Envelope(2, 1, 2, Settled(1, False))))


def test_a_worker_sends_no_reply_to_another_command() -> None:
    session = idle_worker()
    first = framed(Envelope(2, 1, 1, None))
    session.accept(first)
    with pytest.raises(SessionError, match="rank 2 instead of 1"):
        session.replied(answer(first, rank=2))
    with pytest.raises(SessionError, match="seq 7 instead of 1"):
        session.replied(dataclasses.replace(answer(first), seq=7))
    session.replied(answer(first, Status.FAILED))


def test_a_refused_worker_is_told_why() -> None:
    session = WorkerSession(2, 1)
    session.hello_sent()
    with pytest.raises(HandshakeError, match="dtype: float32 and bfloat16"):
        session.welcomed(Welcome(2, 1, "dtype: float32 and bfloat16"))
    assert session.epoch is None


def test_a_worker_of_another_version_than_the_head_refuses_even_a_friendly_welcome() -> None:
    session = WorkerSession(1, 1)
    session.hello_sent()
    with pytest.raises(HandshakeError, match="the head has v2, rank 1 has v1"):
        session.welcomed(Welcome(2, 1, ""))
