# SPDX-License-Identifier: MIT OR Apache-2.0
"""100,000 random and damaged frames on the worker's end of its link: a legal message, or a refusal without effect."""

from __future__ import annotations

import pytest

from metrale_ray.errors import FrameError, HandshakeError, LinkLost, SessionError
from metrale_ray.protocol.codec import decode_command, decode_welcome, encode_command, encode_reply, encode_welcome
from metrale_ray.protocol.commands import Cmd, Ping, Rank, Welcome
from metrale_ray.protocol.link import HEAD_RANK, WorkerLink
from metrale_ray.protocol.session import State
from tests.protocol.feed import Feed
from tests.protocol.fuzzing import NUM_FRAMES, Tally, run_frames, steady_memory
from tests.protocol.mutations import Mutator
from tests.protocol.samples import COMMANDS, envelope, frame, golden_messages, hello, replies, to_bytes
from tests.protocol.test_session import answer

NUM_WELCOMES = NUM_FRAMES // 10
VERSIONS = (1, 2)
SEEDS = {1: 8101, 2: 8102}


class Worker:
    """A worker's link that has answered its first command, and gets the second one from the fuzzer."""

    def __init__(self, version: int) -> None:
        self.feed = Feed()
        self.link = WorkerLink(Rank(1), self.feed, version)
        self.version = version
        self.link.hello(hello(version))

    def opened(self) -> Worker:
        self.feed.put(encode_welcome(Welcome(self.version, 1, "")))
        self.link.expect_welcome(0)
        self.feed.put(frame(self.version, Ping(), 1).data)
        self.link.reply(answer(self.link.receive()))
        return self


def read_commands(version: int, seed: int, num_frames: int) -> Tally:
    valid = [to_bytes(command, version) for command in COMMANDS[version].values()]
    others = [to_bytes(message, v) for v in VERSIONS for message in golden_messages(v).values()]
    mutator = Mutator(seed, valid, others)
    worker = Worker(version).opened()

    def read(data: bytes) -> str:
        nonlocal worker
        session = worker.link._session
        before = dict(vars(session))
        worker.feed.put(data)
        try:
            received = worker.link.receive()
        except (FrameError, SessionError):
            assert vars(session) == before
            raise
        assert received.data is data
        assert received.envelope == envelope(version) or received.envelope.settled.ok is False  # type: ignore[union-attr]
        again = decode_command(encode_command(received.envelope, received.command))
        assert (again.envelope, again.command) == (received.envelope, received.command)
        assert session.state in (State.BUSY, State.LOADING, State.ENDING)
        worker = Worker(version).opened()
        return received.command.code.name

    return run_frames("worker", seed, (mutator.next() for _ in range(num_frames)), read, _REFUSALS, HEAD_RANK)


_REFUSALS = (FrameError, SessionError)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_command_is_taken_whole_or_refused_and_then_nothing_has_changed(version: int, scale: int) -> None:
    num_frames = (NUM_FRAMES - NUM_WELCOMES) // len(VERSIONS) * scale
    with steady_memory():
        tally = read_commands(version, SEEDS[version], num_frames)
    assert tally.num_frames == num_frames
    assert tally.num_messages > num_frames // 8
    assert set(tally.messages) == {command.code.name for command in COMMANDS[version].values()}
    assert min(tally.messages.values()) > num_frames // 200
    assert tally.refusals["SessionError"] > num_frames // 50
    assert tally.refusals["FrameError"] > num_frames // 4


@pytest.mark.parametrize("version", VERSIONS)
def test_a_welcome_is_taken_or_ends_the_worker_with_a_reason(version: int, scale: int) -> None:
    num_frames = NUM_WELCOMES // len(VERSIONS) * scale
    long = Welcome(version, 1, "dtype: float32 and bfloat16\n" * 40)
    valid = [encode_welcome(m) for m in (Welcome(version, 1, ""), Welcome(version, 2**32 - 1, ""), long)]
    others = [to_bytes(message, v) for v in VERSIONS for message in golden_messages(v).values()]
    mutator = Mutator(SEEDS[version], valid, others)
    worker = Worker(version)

    def read(data: bytes) -> str:
        nonlocal worker
        worker.feed.put(data)
        try:
            welcome = worker.link.expect_welcome(0)
        except HandshakeError:
            worker = Worker(version)
            raise
        except LinkLost:
            assert worker.link._session.state is State.GREETED
            raise
        assert (welcome.version, welcome.refusal) == (version, "")
        assert decode_welcome(encode_welcome(welcome)) == welcome
        assert worker.link._session.epoch == welcome.epoch
        worker = Worker(version)
        return "welcome"

    frames = (mutator.next() for _ in range(num_frames))
    tally = run_frames("worker", SEEDS[version], frames, read, (LinkLost, HandshakeError), HEAD_RANK)
    assert tally.num_frames == num_frames
    assert tally.num_messages > num_frames // 20
    assert tally.refusals["HandshakeError"] > num_frames // 20


def test_what_a_worker_sends_is_no_command() -> None:
    worker = Worker(2).opened()
    for reply in replies(2).values():
        worker.feed.put(encode_reply(reply))
        with pytest.raises(FrameError, match="kind is 'reply'; expected 'command'"):
            worker.link.receive()
    assert len(Cmd) == len({command.code for command in COMMANDS[2].values()})
