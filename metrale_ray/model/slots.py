# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Slots`: one rank's mirror of the live sequences, and the proof that it is in step.

Rules. A command is checked whole (`slot_checks`) before anything changes. Its effect is staged; the next command's
`settled` makes it real or drops it, on every rank alike. The digest covers the settled commands and what they left in
the slots that they touched, so two ranks with the same digest carried out the same stream; a failed command leaves it
unchanged.

Digest: blake2b of 8 bytes over the previous digest, the settled command's bytes, and for each slot that it touched
the slot, the settled length and the block table as little-endian u32.

Witness: blake2b of 8 bytes over what the last command is on this rank: the bytes of its frame; and, once its rows are
staged, their token ids, their block tables, and slot, start and end of each. It shows a difference at the very command,
before a token leaves; the digest shows it one command later.

It leaves out every decision: the head made them, and they are in the command. No torch here.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from metrale_ray.errors import Desync
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.slot_checks import SlotChecks, SlotLimits
from metrale_ray.protocol.commands import (
    Command,
    CommandFrame,
    DecodeBatch,
    FreeSlot,
    MixedStep,
    Settled,
    Slot,
    Span,
    command_rows,
)

DIGEST_BYTES = 8


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
        SlotChecks(self.limits, self._live, self._owned).check(command)

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
            token_ids: list[int] = []
            lengths: list[int] = []
            tables: list[array[int]] = []
            for seq, span, _ in staged.rows:
                token_ids += span.token_ids
                lengths += (span.slot, seq.length, span.start + len(span.token_ids))
                tables.append(seq.block_table)
            witness["tokens"] = _hash(_u32_bytes(array("I", token_ids)))
            witness["blocks"] = _hash(_u32_bytes(array("I", map(len, tables)), *tables))
            witness["lengths"] = _hash(_u32_bytes(array("I", lengths)))
        return witness

    def corrupt_digest(self) -> None:
        """Make this rank differ from the others; only a fault injected on purpose calls this."""
        self.digest = bytes(b ^ 0xFF for b in self.digest)

    def flip_token(self, slot: Slot) -> None:
        """Flip a bit of the last staged token of `slot`, as it will be run here; only a fault calls this."""
        assert self._staged is not None, "the fault comes after staging"
        rows = []
        for number, (seq, span, num_blocks) in enumerate(self._staged.rows):
            if span.slot == slot:
                flipped = span.token_ids[-1] ^ 1
                last = flipped if flipped < self.limits.vocab_size else span.token_ids[-1] - 1
                span = replace(span, token_ids=(*span.token_ids[:-1], last))
                self._staged.rows[number] = (seq, span, num_blocks)
            rows.append(span)
        command = self._staged.command
        is_batch = isinstance(command, DecodeBatch | MixedStep)
        self._staged.command = replace(command, **({"rows": tuple(rows)} if is_batch else {"row": rows[0]}))

    def flip_block(self, slot: Slot) -> None:
        """Flip a bit of the last block id in the table of `slot`; only a fault calls this."""
        self._live[slot].block_table[-1] ^= 1

    def flip_length(self, slot: Slot) -> None:
        """Flip a bit of the settled length of `slot`; only a fault calls this."""
        self._live[slot].length ^= 1

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
        left: list[array[int]] = []
        for slot in touched:
            seq = self._live.get(slot)
            left.append(array("I", (slot, seq.length if seq else 0)))
            if seq:
                left.append(seq.block_table)
        self.digest = _hash(b"".join((self.digest, data, _u32_bytes(*left))))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _u32_bytes(*arrays: array[int]) -> bytes:
    """All numbers of u32 arrays, one after another, as little-endian bytes."""
    joined = b"".join(arrays)
    if sys.byteorder == "little":
        return joined
    swapped = array("I", joined)
    swapped.byteswap()
    return swapped.tobytes()
