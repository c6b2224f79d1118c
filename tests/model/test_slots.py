# SPDX-License-Identifier: MIT OR Apache-2.0
"""A rank's mirror of the sequences: checks, staging, settling, digests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metrale_ray.errors import CommandRefused, Desync
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.slot_checks import SlotLimits
from metrale_ray.model.slots import Slots
from metrale_ray.protocol.commands import (
    BlockId,
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    Envelope,
    FreeSlot,
    Load,
    MixedStep,
    Ping,
    PrefillChunk,
    Scrub,
    Settled,
    Slot,
    Span,
)

LIMITS = SlotLimits(max_batch_size=4, max_model_len=64, max_num_batched_tokens=40, vocab_size=100, block_size=4)


class Stream:
    """The command stream of one rank, as the head would send it."""

    def __init__(self, num_blocks: int = 32) -> None:
        self.freed: list[Slot] = []
        self.slots = Slots(LIMITS, SequenceState, lambda seq: self.freed.append(seq.slot))
        self.slots.reserve(num_blocks)
        self._seq = 0
        self._settled: Settled | None = None

    def send(self, command: Command, *, ok: bool = True) -> list[SequenceState]:
        self._seq += 1
        frame = CommandFrame(Envelope(2, 1, self._seq, self._settled), command, f"{self._seq}{command}".encode())
        self.slots.settle(frame.envelope.settled)
        self.slots.check(command)
        states = self.slots.stage(frame)
        if ok:
            self.slots.succeeded()
        self._settled = Settled(self._seq, ok)
        return states

    def prefill(self, slot: int, length: int, first_block: int, *, ok: bool = True) -> list[SequenceState]:
        return self.send(PrefillChunk(span(slot, 0, length, first_block)), ok=ok)


def span(slot: int, start: int, length: int, first_block: int | None = None) -> Span:
    before, after = -(-start // 4), -(-(start + length) // 4)
    blocks = () if first_block is None else tuple(BlockId(first_block + i) for i in range(after - before))
    return Span(Slot(slot), start, tuple(range(1, length + 1)), blocks)


def refused(stream: Stream, command: Command, match: str) -> CommandRefused:
    stream.send(Ping())
    before = (stream.slots.num_live, stream.slots.num_owned_blocks)
    with pytest.raises(CommandRefused, match=match) as caught:
        stream.slots.check(command)
    assert (stream.slots.num_live, stream.slots.num_owned_blocks) == before
    return caught.value


def test_a_length_is_settled_only_by_the_next_command() -> None:
    stream = Stream()
    (state,) = stream.prefill(0, 6, 0)
    assert (state.length, list(state.block_table)) == (0, [0, 1])
    stream.send(Ping())
    assert state.length == 6


def test_a_failed_first_chunk_leaves_nothing_behind() -> None:
    stream = Stream()
    stream.prefill(0, 6, 0, ok=False)
    stream.send(Ping())
    assert (stream.slots.num_live, stream.slots.num_owned_blocks, stream.freed) == (0, 0, [0])
    stream.prefill(0, 6, 0)  # the same blocks and slot again


def test_a_failed_decode_drops_its_block_and_keeps_the_rest() -> None:
    stream = Stream()
    (state,) = stream.prefill(0, 4, 0)
    stream.send(Decode(span(0, 4, 1, 9)), ok=False)
    assert list(state.block_table) == [0, 9]
    stream.send(Decode(span(0, 4, 1, 7)))
    stream.send(Ping())
    assert (state.length, list(state.block_table), stream.slots.num_owned_blocks) == (5, [0, 7], 2)


def test_a_slot_is_freed_when_the_free_is_settled_and_its_blocks_can_be_used_again() -> None:
    stream = Stream()
    stream.prefill(2, 8, 3)
    stream.send(FreeSlot(Slot(2)))
    assert stream.freed == []
    stream.prefill(2, 8, 3)
    assert stream.freed == [2]


def test_a_failed_free_frees_nothing() -> None:
    stream = Stream()
    stream.prefill(1, 4, 0)
    stream.send(FreeSlot(Slot(1)), ok=False)
    stream.send(FreeSlot(Slot(1)))
    stream.send(Ping())
    assert (stream.freed, stream.slots.num_live) == ([1], 0)


@pytest.mark.parametrize(
    ("command", "match"),
    [
        (FreeSlot(Slot(3)), "slot 3 is free already"),
        (FreeSlot(Slot(4)), "differ in max_batch_size"),
        (Decode(span(9, 0, 1, 20)), "differ in max_batch_size"),
        (Decode(span(0, 5, 1)), "starts at 5, its length here is 6"),
        (Decode(span(3, 6, 1)), "starts at 6, its length here is 0"),
        (PrefillChunk(span(0, 0, 4, 20)), "starts at 0, its length here is 6"),
        (Decode(Span(Slot(0), 6, (1, 2))), "a decode row has 2 tokens"),
        (DecodeBatch((span(0, 6, 1), span(0, 6, 1))), "slot 0 is in the command twice"),
        (PrefillChunk(Span(Slot(3), 0, ())), "has no tokens"),
        (PrefillChunk(Span(Slot(3), 0, (1, 100), (BlockId(20),))), "token id 100, the vocabulary has 100"),
        (PrefillChunk(Span(Slot(3), 0, (1,), (BlockId(32),))), "block 32 is not below 32"),
        (PrefillChunk(Span(Slot(3), 0, (1,), (BlockId(1),))), "block 1 belongs to a sequence already"),
        (MixedStep((span(2, 0, 3, 20), span(3, 0, 3, 20))), "block 20 belongs to a sequence already"),
        (PrefillChunk(Span(Slot(3), 0, (1,) * 5, (BlockId(20),))), "1 blocks of 4 tokens for 5 tokens"),
        (MixedStep((span(2, 0, 21, 10), span(3, 0, 20, 20))), "more tokens than the 40"),
        (Load(4), "loaded already"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_anything_changes(command: Command, match: str) -> None:
    stream = Stream()
    stream.prefill(0, 6, 0)
    refused(stream, command, match)


def test_a_sequence_may_not_outgrow_the_model() -> None:
    stream = Stream()
    for start in (0, 32):
        stream.send(PrefillChunk(span(0, start, 32, start // 4)))
    assert list(refused(stream, Decode(span(0, 64, 1, 20)), "past max_model_len 64").slots or ()) == [0]


def test_rows_before_the_load_are_refused() -> None:
    slots = Slots(LIMITS, SequenceState, lambda seq: None)
    with pytest.raises(CommandRefused, match="nothing is loaded yet"):
        slots.check(PrefillChunk(span(0, 0, 2, 0)))


def test_equal_streams_have_equal_digests_and_each_command_changes_them() -> None:
    one, other = Stream(), Stream()
    digests = {one.slots.digest}
    for command in (PrefillChunk(span(0, 0, 6, 0)), Decode(span(0, 6, 1)), FreeSlot(Slot(0)), Ping(), Ping()):
        one.send(command)
        other.send(command)
        assert one.slots.digest == other.slots.digest
        digests.add(one.slots.digest)
    assert len(digests) == 5  # the last command is not settled yet


def test_a_failed_command_leaves_the_digest_as_it_was() -> None:
    stream = Stream()
    stream.prefill(0, 6, 0)
    stream.send(Decode(span(0, 6, 1)), ok=False)
    before = stream.slots.digest
    stream.send(Ping())
    assert stream.slots.digest == before


@pytest.mark.parametrize("block", [5, 6])
def test_the_digest_covers_the_block_tables(block: int) -> None:
    def digest_with(this: int) -> bytes:
        slots = Stream().slots
        row = Span(Slot(0), 0, (1,), (BlockId(this),))
        frame = CommandFrame(Envelope(2, 1, 1, None), PrefillChunk(row), b"the same bytes")
        slots.settle(None)
        slots.stage(frame)
        slots.succeeded()
        slots.settle(Settled(1, True))
        return slots.digest

    assert (digest_with(5) == digest_with(block)) is (block == 5)


def witness_of(*rows: Span, data: bytes = b"the same bytes", before: int = 0) -> dict[str, bytes]:
    """The witness of a step of `rows`, after a prefill of `before` tokens in slot 0 and block 20 on."""
    stream = Stream()
    if before:
        stream.prefill(0, before, 20)
        stream.send(Ping())
    frame = CommandFrame(Envelope(2, 1, 9, None), MixedStep(rows), data)
    stream.slots._staged = None
    stream.slots.stage(frame)
    return stream.slots.witness()


ROW = Span(Slot(0), 4, (7, 8), (BlockId(1),))
OTHER_ROW = Span(Slot(3), 0, (9,), (BlockId(2),))


@pytest.mark.parametrize(
    ("rows", "data", "before", "differs"),
    [
        ((ROW, OTHER_ROW), b"the same bytes", 4, set()),
        ((ROW, OTHER_ROW), b"the same byte", 4, {"command"}),
        ((replace(ROW, token_ids=(7, 9)), OTHER_ROW), b"the same bytes", 4, {"tokens"}),
        ((replace(ROW, new_blocks=(BlockId(3),)), OTHER_ROW), b"the same bytes", 4, {"blocks"}),
        ((replace(ROW, slot=Slot(1)), OTHER_ROW), b"the same bytes", 4, {"blocks", "lengths"}),
        ((replace(ROW, token_ids=(7,)), replace(OTHER_ROW, token_ids=(8, 9))), b"the same bytes", 4, {"lengths"}),
        ((ROW, OTHER_ROW), b"the same bytes", 3, {"lengths"}),
        ((ROW, OTHER_ROW), b"the same bytes", 8, {"blocks", "lengths"}),
        ((OTHER_ROW, ROW), b"the same bytes", 4, {"tokens", "blocks", "lengths"}),
    ],
)
def test_a_witness_shows_what_is_staged_and_each_part_shows_its_own(
    rows: tuple[Span, ...], data: bytes, before: int, differs: set[str]
) -> None:
    usual, found = witness_of(ROW, OTHER_ROW, before=4), witness_of(*rows, data=data, before=before)
    assert set(usual) == set(found) == {"command", "tokens", "blocks", "lengths"}
    assert {name for name in usual if usual[name] != found[name]} == differs


def test_blocks_that_move_from_one_table_to_the_next_show() -> None:
    one = witness_of(replace(OTHER_ROW, new_blocks=(BlockId(1), BlockId(2))), Span(Slot(2), 0, (1,), (BlockId(3),)))
    other = witness_of(replace(OTHER_ROW, new_blocks=(BlockId(1),)), Span(Slot(2), 0, (1,), (BlockId(2), BlockId(3))))
    assert {name for name in one if one[name] != other[name]} == {"blocks"}


def test_a_command_without_rows_and_a_refused_one_show_their_bytes_alone() -> None:
    stream = Stream()
    stream.send(Ping())
    assert set(stream.slots.witness()) == {"command"}
    stream.slots.refuse(CommandFrame(Envelope(2, 1, 2, None), PrefillChunk(span(0, 0, 4, 0)), b"refused"))
    assert set(stream.slots.witness()) == {"command"}


@pytest.mark.parametrize(
    ("scrub", "match"),
    [
        (Scrub(3, 3), "there is no part 3 of 3"),
        (Scrub(0, 0), "there is no part 0 of 0"),
        (Scrub(0, 1, Slot(1)), "slot 1 is free"),
        (Scrub(0, 1, Slot(4)), "differ in max_batch_size"),
        (Scrub(0, 1, Slot(0), 99), "none from 99 on"),
    ],
)
def test_a_scrub_of_what_is_not_there_is_refused(scrub: Scrub, match: str) -> None:
    stream = Stream()
    stream.prefill(0, 6, 0)
    refused(stream, scrub, match)
    stream.slots.check(Scrub(0, 1, Slot(0)))


def test_a_scrub_before_the_load_is_refused() -> None:
    with pytest.raises(CommandRefused, match="nothing is loaded yet"):
        Slots(LIMITS, SequenceState, lambda seq: None).check(Scrub(0, 1))


@pytest.mark.parametrize("settled", [None, Settled(2, True), Settled(1, True)])
def test_a_head_that_settles_something_else_is_out_of_step(settled: Any) -> None:
    stream = Stream()
    stream.prefill(0, 4, 0, ok=False)
    with pytest.raises(Desync):
        stream.slots.settle(settled)


@pytest.mark.parametrize("num_blocks", [0, 65, 2**32 - 1])
def test_a_load_that_reserves_no_block_or_more_than_all_slots_can_fill_is_refused(num_blocks: int) -> None:
    slots = Slots(LIMITS, SequenceState, lambda seq: None)
    with pytest.raises(CommandRefused, match="all slots together can fill 1 to 64"):
        slots.check(Load(num_blocks))
    slots.check(Load(64))
