# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether a rank can carry out a command, looked at whole before anything changes.

Rules: the same on every rank, against the rank's own slots. What is refused here by all ranks is the command's mistake;
what only some refuse says that they are no longer in step. The messages say what is here and what was asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metrale_ray.errors import CommandRefused
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.protocol.commands import (
    Command,
    Decode,
    DecodeBatch,
    FreeSlot,
    Load,
    Scrub,
    Slot,
    Span,
    command_rows,
)


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """What every row is checked against; equal on all ranks, as the handshake compares them."""

    max_batch_size: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    block_size: int

    @property
    def max_num_blocks(self) -> int:
        """KV blocks that all slots together can fill."""
        return self.max_batch_size * -(-self.max_model_len // self.block_size)


class SlotChecks:
    """The checks against `live` sequences by slot, and `owned` blocks: one byte each, not 0 for one that is in use."""

    def __init__(self, limits: SlotLimits, live: Mapping[Slot, SequenceState], owned: Sequence[int]) -> None:
        self._limits = limits
        self._live = live
        self._owned = owned

    def check(self, command: Command) -> None:
        """Raise CommandRefused unless every part of `command` can be carried out."""
        match command:
            case FreeSlot(slot):
                self._check_slot(slot)
                if slot not in self._live:
                    raise CommandRefused(f"slot {slot} is free already", slots=[slot])
            case Scrub():
                self._check_scrub(command)
            case Load() if self._owned:
                raise CommandRefused("the weights are loaded already")
            case Load(num_blocks):
                if not 1 <= num_blocks <= self._limits.max_num_blocks:
                    raise CommandRefused(
                        f"{num_blocks} KV blocks are to be reserved; all slots together can fill 1 to "
                        f"{self._limits.max_num_blocks}"
                    )
            case _:
                self._check_rows(command, command_rows(command))

    def _check_scrub(self, scrub: Scrub) -> None:
        if not self._owned:
            raise CommandRefused("nothing is loaded yet")
        if not 0 <= scrub.part < scrub.num_parts:
            raise CommandRefused(f"there is no part {scrub.part} of {scrub.num_parts}")
        if scrub.slot is not None:
            self._check_slot(scrub.slot)
            if scrub.slot not in self._live:
                raise CommandRefused(f"slot {scrub.slot} is free", slots=[scrub.slot])
            length = self._live[scrub.slot].length
            if scrub.start >= length:
                raise CommandRefused(f"slot {scrub.slot} has {length} settled rows, and none from {scrub.start} on")

    def _check_rows(self, command: Command, rows: Sequence[Span]) -> None:
        if rows and not self._owned:
            raise CommandRefused("nothing is loaded yet")
        if sum(len(span.token_ids) for span in rows) > self._limits.max_num_batched_tokens:
            raise CommandRefused(f"more tokens than the {self._limits.max_num_batched_tokens} that one step may have")
        seen: set[Slot] = set()
        taken: set[int] = set()
        for span in rows:
            self._check_slot(span.slot)
            if span.slot in seen:
                raise CommandRefused(f"slot {span.slot} is in the command twice", slots=[span.slot])
            seen.add(span.slot)
            if isinstance(command, Decode | DecodeBatch) and len(span.token_ids) != 1:
                raise CommandRefused(f"a decode row has {len(span.token_ids)} tokens", slots=[span.slot])
            self._check_span(span)
            self._check_blocks(span, taken)

    def _check_slot(self, slot: Slot) -> None:
        if slot >= self._limits.max_batch_size:
            raise CommandRefused(
                f"slot {slot} is not below max_batch_size {self._limits.max_batch_size}: "
                "the head and this rank probably differ in max_batch_size",
                slots=[slot],
            )

    def _check_span(self, span: Span) -> None:
        seq = self._live.get(span.slot)
        length = seq.length if seq else 0
        if span.start != length:
            raise CommandRefused(
                f"slot {span.slot} starts at {span.start}, its length here is {length}", slots=[span.slot]
            )
        if not span.token_ids:
            raise CommandRefused(f"slot {span.slot} has no tokens", slots=[span.slot])
        if span.end > self._limits.max_model_len:
            raise CommandRefused(
                f"slot {span.slot} would grow to {span.end} tokens, past max_model_len {self._limits.max_model_len}",
                slots=[span.slot],
            )
        if max(span.token_ids) >= self._limits.vocab_size:
            raise CommandRefused(
                f"slot {span.slot} has token id {max(span.token_ids)}, the vocabulary has {self._limits.vocab_size}",
                slots=[span.slot],
            )

    def _check_blocks(self, span: Span, taken: set[int]) -> None:
        for block in span.new_blocks:
            if block >= len(self._owned):
                raise CommandRefused(f"block {block} is not below {len(self._owned)}", slots=[span.slot])
            if self._owned[block] or block in taken:
                raise CommandRefused(f"block {block} belongs to a sequence already", slots=[span.slot])
            taken.add(block)
        seq = self._live.get(span.slot)
        num_blocks = (len(seq.block_table) if seq else 0) + len(span.new_blocks)
        if num_blocks * self._limits.block_size < span.end:
            raise CommandRefused(
                f"slot {span.slot} has {num_blocks} blocks of {self._limits.block_size} tokens for {span.end} tokens",
                slots=[span.slot],
            )
