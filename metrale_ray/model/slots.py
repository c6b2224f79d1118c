# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Slots`: one rank's mirror of the live sequences, and the proof that it is in step.

Rules. A command is checked whole before anything changes. Its effect is staged; the next command's `settled` makes it
real or drops it, on every rank alike. The digest covers the settled commands and what they left in the slots that
they touched, so two ranks with the same digest carried out the same stream; a failed command leaves it unchanged.

Digest: blake2b of 8 bytes over the previous digest, the settled command's bytes, and for each slot that it touched
the slot, the settled length and the block table as little-endian u32.

Witness: blake2b of 8 bytes over what the last command is on this rank: the bytes of its frame; and, once its rows are
staged, their token ids, their block tables, and slot, start and end of each. It shows a difference at the very command,
before a token leaves; the digest shows it one command later.

It leaves out every decision: the head made them, and they are in the command. No torch here.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from metrale_ray.errors import CommandRefused, Desync
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.protocol.commands import (
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    FreeSlot,
    Load,
    Scrub,
    Settled,
    Slot,
    Span,
    command_rows,
)

DIGEST_BYTES = 8


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


@dataclass(slots=True)
class _Staged:
    frame: CommandFrame
    command: Command  # the frame's, as it is held and carried out here
    succeeded: bool = False
    rows: list[tuple[SequenceState, Span, int]] = field(default_factory=list)  # with the block count before it


class Slots:
    """The live sequences of one rank. `alloc` and `free` are the model's, so it can keep state of its own."""

    def __init__(
        self,
        limits: SlotLimits,
        alloc: Callable[[Slot], SequenceState],
        free: Callable[[SequenceState], None],
    ) -> None:
        self.limits = limits
        self.digest = bytes(DIGEST_BYTES)
        self._alloc = alloc
        self._free = free
        self._live: dict[Slot, SequenceState] = {}
        self._owned = bytearray(0)
        self._staged: _Staged | None = None

    @property
    def num_live(self) -> int:
        """Slots that hold a sequence, staged ones included."""
        return len(self._live)

    @property
    def live(self) -> Mapping[Slot, SequenceState]:
        """The slots that hold a sequence, staged ones included; the caller changes none."""
        return self._live

    @property
    def num_owned_blocks(self) -> int:
        """Blocks in some block table, staged ones included."""
        return sum(self._owned)

    @property
    def staged_seq(self) -> int | None:
        """The number of the command whose effect is staged, or None."""
        return self._staged.frame.envelope.seq if self._staged else None

    @property
    def staged_command(self) -> Command:
        """The command to carry out, once it is staged."""
        if self._staged is None:
            raise AssertionError("no command is staged")
        return self._staged.command

    def sequence(self, slot: Slot) -> SequenceState:
        """The live sequence of a slot that a checked command names."""
        return self._live[slot]

    def reserve(self, num_blocks: int) -> None:
        """Allow blocks 0..num_blocks-1 in commands from now on."""
        self._owned = bytearray(num_blocks)

    def settle(self, settled: Settled | None) -> None:
        """Make the last command's staged effect real, or drop it. Raises Desync when the head and this rank differ."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if settled is None or settled.seq != staged.frame.envelope.seq:
            raise Desync(f"the head settles {settled}, the last command here is {staged.frame.envelope.seq}")
        if settled.ok and not staged.succeeded:
            raise Desync(f"the head settles command {settled.seq}, which did not succeed here", seq=settled.seq)
        if settled.ok:
            self._make_real(staged)
        else:
            self._drop(staged)

    def check(self, command: Command) -> None:
        """Raise CommandRefused unless every part of `command` can be carried out. Changes nothing."""
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
                if not 1 <= num_blocks <= self.limits.max_num_blocks:
                    raise CommandRefused(
                        f"{num_blocks} KV blocks are to be reserved; all slots together can fill 1 to "
                        f"{self.limits.max_num_blocks}"
                    )
            case _:
                self._check_rows(command, command_rows(command))

    def stage(self, frame: CommandFrame) -> list[SequenceState]:
        """Stage a checked command, giving the states of its rows in order, block tables extended."""
        self._staged = staged = _Staged(frame, frame.command)
        for span in command_rows(frame.command):
            seq = self._live.get(span.slot)
            if seq is None:
                seq = self._live[span.slot] = self._alloc(span.slot)
            staged.rows.append((seq, span, len(seq.block_table)))
            seq.block_table.extend(span.new_blocks)
            for block in span.new_blocks:
                self._owned[block] = 1
        return [seq for seq, _, _ in staged.rows]

    def refuse(self, frame: CommandFrame) -> None:
        """Remember a command that had no effect here, so that its `settled` is understood."""
        self._staged = _Staged(frame, frame.command)

    def succeeded(self) -> None:
        """The command staged last ran to its end on this rank."""
        if self._staged is not None:
            self._staged.succeeded = True

    def witness(self) -> dict[str, bytes]:
        """What the last command is on this rank: see the top of this file."""
        staged = self._staged
        if staged is None:
            return {}
        witness = {"command": _hash(staged.frame.data)}
        if staged.rows:
            tables = [seq.block_table for seq, _, _ in staged.rows]
            lengths = [n for seq, span, _ in staged.rows for n in (span.slot, seq.length, span.end)]
            witness["tokens"] = _hash(_u32_bytes([token for _, span, _ in staged.rows for token in span.token_ids]))
            witness["blocks"] = _hash(b"".join([_u32_bytes([len(t) for t in tables]), *map(_u32_bytes, tables)]))
            witness["lengths"] = _hash(_u32_bytes(lengths))
        return witness

    def corrupt_digest(self) -> None:
        """Make this rank differ from the others; only a fault injected on purpose calls this."""
        self.digest = bytes(b ^ 0xFF for b in self.digest)

    def _make_real(self, staged: _Staged) -> None:
        for seq, span, _ in staged.rows:
            seq.length = span.end
        touched = [span.slot for _, span, _ in staged.rows]
        if isinstance(staged.frame.command, FreeSlot):
            self._release(staged.frame.command.slot)
            touched = [staged.frame.command.slot]
        self._extend_digest(staged.frame.data, touched)

    def _drop(self, staged: _Staged) -> None:
        for seq, span, num_blocks in staged.rows:
            for block in span.new_blocks:
                self._owned[block] = 0
            del seq.block_table[num_blocks:]
            if seq.length == 0:
                self._release(span.slot)

    def _release(self, slot: Slot) -> None:
        seq = self._live.pop(slot)
        for block in seq.block_table:
            self._owned[block] = 0
        self._free(seq)

    def _extend_digest(self, data: bytes, touched: Sequence[Slot]) -> None:
        digest = hashlib.blake2b(self.digest, digest_size=DIGEST_BYTES)
        digest.update(data)
        for slot in touched:
            seq = self._live.get(slot)
            digest.update(struct.pack("<II", slot, seq.length if seq else 0))
            if seq:
                digest.update(_u32_bytes(seq.block_table))
        self.digest = digest.digest()

    def _check_scrub(self, scrub: Scrub) -> None:
        if not self._owned:
            raise CommandRefused("nothing is loaded yet")
        if not 0 <= scrub.part < scrub.num_parts:
            raise CommandRefused(f"there is no part {scrub.part} of {scrub.num_parts}")
        if scrub.slot is not None:
            self._check_slot(scrub.slot)
            if scrub.slot not in self._live:
                raise CommandRefused(f"slot {scrub.slot} is free", slots=[scrub.slot])

    def _check_rows(self, command: Command, rows: Sequence[Span]) -> None:
        if rows and not self._owned:
            raise CommandRefused("nothing is loaded yet")
        if sum(len(span.token_ids) for span in rows) > self.limits.max_num_batched_tokens:
            raise CommandRefused(f"more tokens than the {self.limits.max_num_batched_tokens} that one step may have")
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
        if slot >= self.limits.max_batch_size:
            raise CommandRefused(
                f"slot {slot} is not below max_batch_size {self.limits.max_batch_size}: "
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
        if span.end > self.limits.max_model_len:
            raise CommandRefused(
                f"slot {span.slot} would grow to {span.end} tokens, past max_model_len {self.limits.max_model_len}",
                slots=[span.slot],
            )
        if max(span.token_ids) >= self.limits.vocab_size:
            raise CommandRefused(
                f"slot {span.slot} has token id {max(span.token_ids)}, the vocabulary has {self.limits.vocab_size}",
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
        if num_blocks * self.limits.block_size < span.end:
            raise CommandRefused(
                f"slot {span.slot} has {num_blocks} blocks of {self.limits.block_size} tokens for {span.end} tokens",
                slots=[span.slot],
            )


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _u32_bytes(values: Sequence[int]) -> bytes:
    if isinstance(values, array) and sys.byteorder == "little":
        return values.tobytes()
    packed = array("I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
