# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ledger complains of each thing that a head or a rank may get wrong, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.slots import SlotLimits, Slots
from metrale_ray.protocol.codec import encode_command
from metrale_ray.protocol.commands import (
    BlockId,
    Command,
    CommandFrame,
    Decode,
    Envelope,
    FreeSlot,
    Load,
    PrefillChunk,
    Settled,
    Slot,
    Span,
    Status,
    command_rows,
)
from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Commanded,
    Ended,
    ErrorNote,
    RankAnswer,
    RowNote,
    Sampled,
    TokenNote,
)
from tests.simulation.ledger import Ledger

EPOCH = 3
PROMPT = (5, 6, 7)
REQUEST = 11
LIMITS = SlotLimits(max_batch_size=2, max_model_len=16, max_num_batched_tokens=8, vocab_size=100, block_size=4)


class Group:
    """Two ranks' slots under one stream of commands, and the ledger of it."""

    def __init__(self) -> None:
        self.ranks = {rank: Slots(LIMITS, SequenceState, lambda state: None) for rank in (0, 1)}
        self.ledger = Ledger(EPOCH, lambda: self.ranks, lambda: None)
        self.seq = 0
        self.settled: Settled | None = None
        self.command(Load(8))
        for slots in self.ranks.values():
            slots.reserve(8)
        self.ledger.note(Admitted(1, (REQUEST,), 1, 1, PROMPT, len(PROMPT), {"seed": 0}, 0, 0, None))

    def command(
        self,
        command: Command,
        samples: bool = False,
        *,
        fails: bool = False,
        says: Callable[[Envelope], Envelope] = lambda envelope: envelope,
        before_answer: Callable[[], None] = lambda: None,
        verdict: str | None = None,
    ) -> None:
        """One command as the head sends it and the ranks carry it out."""
        self.seq += 1
        envelope = says(Envelope(2, EPOCH, self.seq, self.settled))
        frame = CommandFrame(envelope, command, encode_command(envelope, command))
        rows = tuple(
            RowNote(REQUEST, span.slot, span.start, len(span.token_ids), samples) for span in command_rows(command)
        )
        self.ledger.note(Commanded(2, envelope.epoch, self.seq, int(command.code), rows, frame.data))
        for rank, slots in self.ranks.items():
            slots.settle(self.settled)
            slots.stage(frame)
            if not (fails and rank == 1):
                slots.succeeded()
        before_answer()
        self.settled = Settled(self.seq, not fails)
        self.ledger.note(self._answered(fails, verdict))

    def sample(self, token_id: int, request_id: int = REQUEST) -> None:
        """A token is chosen."""
        self.ledger.note(Sampled(3, self.seq, (TokenNote(request_id, token_id, ()),)))

    def prefill(self, **named: object) -> None:
        """The prompt, from which the first token is chosen."""
        self.command(PrefillChunk(_span(0, PROMPT, 2)), samples=True, **named)  # type: ignore[arg-type]

    def _answered(self, fails: bool, verdict: str | None) -> Answered:
        statuses = (Status.OK, Status.FAILED if fails else Status.OK)
        answers = tuple(
            RankAnswer(rank, status, bytes(8), {}, 0, 0, 0, ErrorNote("failed", "", None) if status else None)
            for rank, status in enumerate(statuses)
        )
        kind = verdict or ("failed" if fails else "ok")
        return Answered(3, self.seq, kind, None, "", answers)  # type: ignore[arg-type]


def _span(start: int, token_ids: tuple[int, ...], *new_blocks: int, slot: int = 0) -> Span:
    return Span(Slot(slot), start, token_ids, tuple(BlockId(block) for block in new_blocks))


@pytest.fixture
def group() -> Group:
    return Group()


def test_a_sequence_from_its_prompt_to_its_end_gives_no_complaint(group: Group) -> None:
    group.prefill()
    group.sample(40)
    group.command(Decode(_span(3, (40,))), samples=True, fails=True)
    group.command(Decode(_span(3, (40,))), samples=True)
    group.sample(41)
    group.ledger.note(Ended(4, REQUEST, "length", "", ""))
    group.command(FreeSlot(Slot(0)))

    assert group.ledger.complaints == []
    assert list(group.ledger.at_rest()) == []


def test_what_is_left_at_rest_is_told(group: Group) -> None:
    group.prefill()
    group.sample(40)

    living, held = group.ledger.at_rest()

    assert "requests [11] never ended" in living
    assert "still hold" in held


def test_numbers_epochs_and_settled_must_be_what_they_are(group: Group) -> None:
    group.command(FreeSlot(Slot(0)), says=lambda envelope: replace(envelope, epoch=2, settled=Settled(1, False)))

    text = "\n".join(group.ledger.complaints)
    assert "command 2 is of epoch 2 in epoch 3" in text
    assert "says Settled(seq=1, ok=False); what happened is Settled(seq=1, ok=True)" in text
    assert "slot 0 is freed and holds nothing" in text


def test_a_row_of_other_tokens_or_of_a_request_that_ended_is_told(group: Group) -> None:
    group.command(PrefillChunk(_span(0, (5, 6, 8), 2)), samples=True)
    assert "has [5, 6, 7] from 0 on, and command 2 (5, 6, 8)" in group.ledger.complaints[0]

    group.sample(40)
    group.ledger.note(Ended(4, REQUEST, "stop", "", ""))
    group.command(Decode(_span(3, (40,))), samples=True)
    assert "which does not live" in group.ledger.complaints[-1]


def test_a_step_that_fails_gives_no_token_and_one_that_succeeds_gives_each_row_one(group: Group) -> None:
    group.prefill(fails=True)
    group.sample(40)
    assert "which owes it none" in group.ledger.complaints[0]

    other = Group()
    other.prefill()
    other.command(FreeSlot(Slot(0)))
    assert "no token was sampled for [11] after command 2" in other.ledger.complaints[0]


def test_success_needs_the_word_of_every_rank(group: Group) -> None:
    group.prefill(fails=True, verdict="ok")

    assert any("taken to have succeeded" in line for line in group.ledger.complaints)


def test_a_rank_that_differs_in_a_length_a_block_or_a_slot_is_named(group: Group) -> None:
    group.prefill()
    group.sample(40)
    live = group.ranks[1]._live

    def another_length() -> None:
        live[Slot(0)].length += 1

    group.command(Decode(_span(3, (40,))), samples=True, before_answer=another_length)
    assert "rank 1 has length 4 in slot 0, which is 3" in group.ledger.complaints[0]

    group.sample(41)
    live[Slot(0)].length -= 1

    def another_block() -> None:
        live[Slot(0)].block_table[0] = BlockId(6)

    group.command(Decode(_span(4, (41,), 3)), samples=True, before_answer=another_block)
    assert "rank 1 has blocks [6, 3] in slot 0" in group.ledger.complaints[1]


def test_an_end_that_comes_twice_is_told(group: Group) -> None:
    for _ in range(2):
        group.ledger.note(Ended(4, REQUEST, "abort", "", ""))

    assert "ends by abort and does not live" in group.ledger.complaints[0]


def test_a_seed_that_is_neither_asked_for_nor_derived_is_a_complaint(group: Group) -> None:
    group.ledger.note(Admitted(4, (REQUEST + 1,), 1, 2, PROMPT, len(PROMPT), {"seed": 8}, 7, 0, None))
    group.ledger.note(Admitted(4, (REQUEST + 2,), 1, 3, PROMPT, len(PROMPT), {"seed": None}, 7, 0, None))

    assert len(group.ledger.complaints) == 2
    assert all("the seed" in line for line in group.ledger.complaints)


@pytest.mark.parametrize("unwanted", [(1, None, None), (1, 1, None), (1, 1, 0)])
def test_what_the_head_was_told_to_end_may_run_once_and_no_longer(
    group: Group, unwanted: tuple[int, int | None, int | None]
) -> None:
    group.ledger.unwanted = lambda: [unwanted]
    group.prefill()
    group.sample(40)
    group.command(Decode(_span(3, (40,))), samples=True)
    group.sample(41)
    assert group.ledger.complaints == []

    group.command(Decode(_span(4, (41,), 3)), samples=True)

    assert "long after it was to end" in group.ledger.complaints[0]


def test_the_end_of_another_sequence_is_no_complaint(group: Group) -> None:
    group.ledger.unwanted = lambda: [(2, None, None), (1, 2, None), (1, 1, 1)]
    group.prefill()
    group.sample(40)
    for number in range(3):
        group.command(Decode(_span(3, (40,))), samples=True, fails=number < 2)
    group.sample(41)

    assert group.ledger.complaints == []
