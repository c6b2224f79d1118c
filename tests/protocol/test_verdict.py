# SPDX-License-Identifier: MIT OR Apache-2.0
"""From replies to a verdict."""

from __future__ import annotations

import pytest

from metrale_ray.errors import Desync
from metrale_ray.protocol.commands import (
    Cmd,
    CommandFrame,
    Envelope,
    Ping,
    Rank,
    Reply,
    ReplyError,
    Slot,
    Status,
)
from metrale_ray.protocol.verdict import Kind, judge

FRAME = CommandFrame(Envelope(2, 1, 7, None), Ping(), b"frame")
SAME = b"12345678"


def reply(
    rank: int, status: Status, code: str = "", slots: tuple[int, ...] | None = None, digest: bytes = SAME
) -> Reply:
    named = None if slots is None else tuple(Slot(s) for s in slots)
    error = ReplyError(code, f"text of rank {rank}", named) if code else None
    return Reply(2, 1, 7, Cmd.PING, Rank(rank), status, digest, error)


def test_all_ok_is_ok() -> None:
    assert judge(FRAME, [reply(0, Status.OK), reply(1, Status.OK)]).ok


def test_refused_by_all_is_rejected_with_the_first_reason_and_every_blamed_slot() -> None:
    verdict = judge(
        FRAME, [reply(0, Status.REFUSED, "command_refused", (3,)), reply(1, Status.REFUSED, "command_refused", (4,))]
    )
    assert (verdict.kind, verdict.rank, verdict.message) == (Kind.REJECTED, 0, "text of rank 0")
    assert verdict.slots == (3, 4)


@pytest.mark.parametrize("others", [Status.OK, Status.FAILED, Status.POISONED])
def test_refused_by_some_is_a_desync_naming_rank_and_command(others: Status) -> None:
    with pytest.raises(Desync, match=r"rank 1 refused command 7 \(ping\)") as caught:
        judge(FRAME, [reply(0, others, "x"), reply(1, Status.REFUSED, "command_refused")])
    assert (caught.value.rank, caught.value.seq) == (1, 7)


def test_differing_digests_are_a_desync_naming_the_rank_and_the_command_before() -> None:
    with pytest.raises(Desync, match="rank 2 differs from rank 0") as caught:
        judge(FRAME, [reply(0, Status.OK), reply(1, Status.OK), reply(2, Status.OK, digest=b"87654321")])
    assert (caught.value.rank, caught.value.seq) == (2, 6)


def test_the_rank_that_failed_first_is_named_and_not_those_that_saw_its_flag() -> None:
    verdict = judge(
        FRAME,
        [
            reply(0, Status.FAILED, "peer_failed"),
            reply(1, Status.FAILED, "boom"),
            reply(2, Status.FAILED, "peer_failed"),
        ],
    )
    assert (verdict.kind, verdict.rank, verdict.code, verdict.slots) == (Kind.FAILED, 1, "boom", None)


def test_a_failure_seen_after_others_succeeded_is_a_failure() -> None:
    assert judge(FRAME, [reply(0, Status.OK), reply(1, Status.FAILED, "boom", (5,))]).slots == (5,)


def test_a_poisoned_slot_comes_before_a_failure() -> None:
    verdict = judge(FRAME, [reply(0, Status.POISONED, "slot_poisoned", (2,)), reply(1, Status.FAILED, "peer_failed")])
    assert (verdict.kind, verdict.slots) == (Kind.POISONED, (2,))


def test_a_flag_that_nobody_raised_is_a_desync() -> None:
    with pytest.raises(Desync, match="no rank reported a failure"):
        judge(FRAME, [reply(0, Status.FAILED, "peer_failed"), reply(1, Status.OK)])


def test_each_blamed_slot_has_the_words_of_the_rank_that_blames_it() -> None:
    verdict = judge(
        FRAME,
        [reply(0, Status.FAILED, "boom"), reply(1, Status.FAILED, "bang", (4,)), reply(2, Status.FAILED, "x", (5,))],
    )
    assert (verdict.rank, verdict.slots) == (0, (4, 5))
    said = [verdict.of_slot(Slot(slot)) for slot in (3, 4, 5)]
    assert [(one.rank, one.code, one.message) for one in said] == [
        (0, "boom", "text of rank 0"),
        (1, "bang", "text of rank 1"),
        (2, "x", "text of rank 2"),
    ]
