# SPDX-License-Identifier: MIT OR Apache-2.0
"""100,000 random and damaged frames on the head's end of a link: the worker's message, or the loss of that rank."""

from __future__ import annotations

import dataclasses

import pytest

from metrale_ray.errors import Desync, LinkLost, SessionError
from metrale_ray.protocol.codec import decode_hello, decode_reply, encode_hello, encode_reply
from metrale_ray.protocol.commands import Cmd, Command, CommandFrame, Hello, Load, Progress, Rank, Reply, Status
from metrale_ray.protocol.link import HeadLink
from metrale_ray.protocol.session import State
from metrale_ray.protocol.verdict import judge
from tests.protocol.feed import Feed
from tests.protocol.fuzzing import NUM_FRAMES, Tally, run_frames, steady_memory
from tests.protocol.mutations import Mutator
from tests.protocol.samples import SINGLE_SLOT, frame, golden_messages, hello, replies, to_bytes

RANK = Rank(1)
VERSIONS = (1, 2)
NUM_HELLOS = NUM_FRAMES // 5
NUM_REPLIES = NUM_FRAMES - NUM_HELLOS
OTHERS = [to_bytes(message, version) for version in VERSIONS for message in golden_messages(version).values()]
ASKED: dict[str, Command] = {"load": Load(4096), "decode": SINGLE_SLOT["decode"]}
SEEDS = {(1, "load"): 9101, (1, "decode"): 9102, (2, "load"): 9103, (2, "decode"): 9104}


def new_link(version: int) -> tuple[Feed, HeadLink]:
    feed = Feed()
    return feed, HeadLink(RANK, feed, version, 1)


def busy_link(version: int, sent: CommandFrame) -> tuple[Feed, HeadLink]:
    """A link to a worker that has been sent `sent` and owes the answer."""
    feed, link = new_link(version)
    feed.put(encode_hello(hello(version)))
    link.expect_hello(0)
    link._state = State.IDLE  # what a welcome would make of it, without its bytes
    link.send(sent)
    return feed, link


@pytest.mark.parametrize("version", VERSIONS)
def test_a_hello_is_read_or_the_rank_is_lost(version: int, scale: int) -> None:
    num_frames = NUM_HELLOS // len(VERSIONS) * scale
    many = Hello(RANK, version, {f"shard {n}": "9" * 40 for n in range(20)}, {}, 2**32 - 1)
    mutator = Mutator(9001, [*map(encode_hello, (hello(version), many))], OTHERS)
    feed, link = new_link(version)

    def read(data: bytes) -> str:
        nonlocal feed, link
        feed.put(data)
        try:
            found = link.expect_hello(0)
        except (LinkLost, SessionError):
            assert link._state is State.NEW
            raise
        assert found.rank == RANK
        assert decode_hello(encode_hello(found)) == found
        feed, link = new_link(version)
        return "hello" if found.version == version else "hello of another version"

    frames = (mutator.next() for _ in range(num_frames))
    with steady_memory():
        tally = run_frames("head", 9001, frames, read, (LinkLost, SessionError), RANK)
    assert tally.num_frames == num_frames
    assert tally.messages["hello"] > num_frames // 10
    assert tally.messages["hello of another version"] > 0
    assert tally.refusals["SessionError"] > 0


def answers(version: int, sent: CommandFrame) -> list[bytes]:
    """Valid answers to `sent`, one of each status that it may have."""
    cmd, may_progress = sent.command.code, isinstance(sent.command, Load)
    found = [dataclasses.replace(reply, cmd=cmd) for reply in replies(version).values()]
    return [encode_reply(reply) for reply in found if may_progress or reply.status is not Status.PROGRESS]


def read_replies(version: int, asked: str, num_frames: int) -> Tally:
    seed = SEEDS[version, asked]
    sent = frame(version, ASKED[asked])
    mutator = Mutator(seed, answers(version, sent), OTHERS)
    own = decode_reply(answers(version, sent)[0])
    feed, link = busy_link(version, sent)
    owing = link._state
    told: list[Progress] = []

    def read(data: bytes) -> str:
        nonlocal feed, link
        told.clear()
        feed.put(data)
        try:
            reply = link.poll_progress(told.append) if asked == "load" else link.collect(sent, 0)
        except (LinkLost, SessionError):
            assert (link._state, link._frame, link._early, told) == (owing, sent, None, [])
            raise
        if reply is None:
            assert len(told) == 1
            assert link._state is owing
            return "PROGRESS"
        check_answer(sent, own, reply)
        feed, link = busy_link(version, sent)
        return reply.status.name

    frames = (mutator.next() for _ in range(num_frames))
    return run_frames("head", seed, frames, read, (LinkLost, SessionError), RANK)


def check_answer(sent: CommandFrame, own: Reply, reply: Reply) -> None:
    """It answers `sent` and no other command, can be sent again, and gives a verdict that agrees with it."""
    assert (reply.epoch, reply.seq, reply.cmd, reply.rank) == (1, 2, sent.command.code, RANK)
    assert decode_reply(encode_reply(reply)) == reply
    replies = [dataclasses.replace(own, rank=Rank(0)), reply]
    is_of_another = reply.digest != own.digest or shows_otherwise(own, reply)
    if is_of_another or reply.status is Status.REFUSED or code_of(reply) in ("peer_failed", "memory_damaged"):
        with pytest.raises(Desync) as caught:
            judge(sent, replies)
        assert caught.value.rank == RANK
        return
    verdict = judge(sent, replies)
    assert verdict.ok == (reply.status is Status.OK)
    assert verdict.ok or verdict.rank == RANK


def shows_otherwise(own: Reply, reply: Reply) -> bool:
    """Whether the witnesses differ; those of two that succeeded have the same names, too."""
    names = own.witness.keys() & reply.witness.keys()
    if any(own.witness[name] != reply.witness[name] for name in names):
        return True
    return own.status is reply.status is Status.OK and own.witness.keys() != reply.witness.keys()


def code_of(reply: Reply) -> str | None:
    return None if reply.error is None else reply.error.code


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_reply_answers_the_command_in_hand_or_the_rank_is_lost(version: int, asked: str, scale: int) -> None:
    num_frames = NUM_REPLIES // len(SEEDS) * scale
    with steady_memory():
        tally = read_replies(version, asked, num_frames)
    assert tally.num_frames == num_frames
    assert tally.num_messages > num_frames // 10
    expected = {status.name for status in Status if asked == "load" or status is not Status.PROGRESS}
    assert set(tally.messages) == expected
    assert tally.refusals["SessionError"] > num_frames // 50
    assert tally.refusals["LinkLost"] > num_frames // 4


def test_the_frames_of_the_head_are_100000() -> None:
    assert NUM_HELLOS // 2 * 2 + NUM_REPLIES // len(SEEDS) * len(SEEDS) == NUM_FRAMES
    assert Cmd.LOAD in {command.code for command in ASKED.values()}
