# SPDX-License-Identifier: MIT OR Apache-2.0
"""From replies to a verdict."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from metrale_ray.errors import Desync
from metrale_ray.protocol.commands import (
    WITNESSES,
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


OTHER = b"87654321"
FIELDS = (
    "tokens",
    "blocks",
    "lengths",
    "command",
    "residual",
    "routing",
    "weights",
    "kv",
)  # what says most comes first


def reply(
    rank: int,
    status: Status,
    code: str = "",
    slots: tuple[int, ...] | None = None,
    digest: bytes = SAME,
    witness: Mapping[str, bytes] | None = None,
    message: str = "",
) -> Reply:
    named = None if slots is None else tuple(Slot(s) for s in slots)
    error = ReplyError(code, message or f"text of rank {rank}", named) if code else None
    return Reply(2, 1, 7, Cmd.PING, Rank(rank), status, digest, error, witness=witness or {})


def showing(*values: bytes | None, field: str = "tokens") -> list[Reply]:
    """An OK of each rank, with that value of one witness, or without it."""
    return [reply(n, Status.OK, witness={} if v is None else {field: v}) for n, v in enumerate(values)]


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
        judge(FRAME, [reply(0, Status.OK), reply(1, Status.OK), reply(2, Status.OK, digest=OTHER)])
    assert (caught.value.rank, caught.value.seq, caught.value.field) == (2, 6, "digest")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_with_three_ranks_the_one_outside_the_majority_is_named_rank_0_too(odd: int) -> None:
    digests = [OTHER if rank == odd else SAME for rank in range(3)]
    for replies in ([reply(n, Status.OK, digest=d) for n, d in enumerate(digests)], showing(*digests)):
        with pytest.raises(
            Desync, match=f"rank {odd} differs from rank {int(odd == 0)}, with which 1 more agrees"
        ) as e:
            judge(FRAME, replies)
        assert e.value.rank == odd


@pytest.mark.parametrize(
    ("values", "odd", "told"),
    [
        ((SAME, OTHER), 1, "rank 1 differs from rank 0 in"),
        ((SAME, OTHER, SAME, OTHER), 1, "rank 1 differs from rank 0 in"),
        ((SAME, OTHER, b"abcdefgh"), 1, "rank 1 differs from rank 0 in"),
        ((OTHER, SAME, SAME, b"abcdefgh", SAME), 0, "rank 0 differs from rank 1, with which 2 more agree, in"),
        ((None, SAME, None, OTHER), 3, "rank 3 differs from rank 1 in"),  # those that show none have no vote
    ],
)
def test_without_a_majority_the_first_rank_that_differs_is_named(
    values: tuple[bytes | None, ...], odd: int, told: str
) -> None:
    with pytest.raises(Desync, match=rf"{told} the token ids of command 7 \(ping\): ") as caught:
        judge(FRAME, showing(*values))
    assert (caught.value.rank, caught.value.seq, caught.value.field) == (odd, 7, "tokens")


@pytest.mark.parametrize("place", range(len(FIELDS)))
def test_of_several_witnesses_that_differ_the_one_that_says_most_is_named(place: int) -> None:
    mine, other = (dict.fromkeys(FIELDS[place:], value) for value in (SAME, OTHER))
    with pytest.raises(Desync) as caught:
        judge(FRAME, [reply(0, Status.OK, witness=mine), reply(1, Status.OK, witness=other)])
    assert caught.value.field == FIELDS[place]


def test_each_witness_has_its_place_among_those_compared() -> None:
    assert set(FIELDS) == set(WITNESSES)


def test_a_witness_that_a_failed_rank_does_not_show_is_compared_among_the_others() -> None:
    failed = reply(0, Status.FAILED, "boom")
    assert judge(FRAME, [failed, *showing(None, SAME, SAME)[1:]]).kind is Kind.FAILED
    with pytest.raises(Desync, match="rank 2 differs from rank 1"):
        judge(FRAME, [failed, *showing(None, SAME, OTHER)[1:]])


@pytest.mark.parametrize(
    ("values", "odd", "told"),
    [((SAME, None), 1, "not"), ((None, SAME, None), 1, "beside the rest"), ((None, SAME, SAME), 0, "not")],
)
def test_a_rank_that_succeeded_and_shows_other_witnesses_than_the_others_is_a_desync(
    values: tuple[bytes | None, ...], odd: int, told: str
) -> None:
    with pytest.raises(Desync, match=rf"^rank {odd} .* in what it shows .* the token ids {told}$") as caught:
        judge(FRAME, showing(*values))
    assert (caught.value.rank, caught.value.seq, caught.value.field) == (odd, 7, "tokens")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_where_most_ranks_refused_the_one_that_did_not_is_named(odd: int) -> None:
    replies = [reply(n, Status.OK) if n == odd else reply(n, Status.REFUSED, "command_refused") for n in range(3)]
    with pytest.raises(Desync, match=rf"^rank {odd} did not refuse command 7 \(ping\) and others did: text of") as e:
        judge(FRAME, replies)
    assert e.value.rank == odd


def test_witnesses_are_compared_before_what_the_statuses_say() -> None:
    failed = [reply(n, Status.FAILED, "boom", witness={"blocks": v}) for n, v in enumerate((SAME, OTHER))]
    with pytest.raises(Desync, match="the block tables"):
        judge(FRAME, failed)
    refused = reply(1, Status.REFUSED, "command_refused", witness={"command": OTHER})
    with pytest.raises(Desync, match="the bytes of the frame"):
        judge(FRAME, [reply(0, Status.OK, witness={"command": SAME}), refused])


def test_damaged_memory_is_a_desync_naming_rank_command_and_tensor() -> None:
    damaged = reply(1, Status.FAILED, "memory_damaged", message="layers.3.qkv no longer holds what was loaded")
    with pytest.raises(
        Desync, match=r"the memory of rank 1 is damaged, found by command 7 \(ping\): layers.3.qkv no"
    ) as e:
        judge(FRAME, [reply(0, Status.OK), damaged])
    assert (e.value.rank, e.value.seq, e.value.field) == (1, 7, "layers.3.qkv")


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
