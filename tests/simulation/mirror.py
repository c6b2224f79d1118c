# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Mirror`: what every rank must hold, worked out from the head's commands and their outcomes alone.

It is a second, plain account of the protocol's rules for slots, lengths and block tables, written without the
engine's own code, and compared with each rank and with the head's pools after each command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from metrale_ray.model.slots import Slots
from metrale_ray.protocol.commands import CommandFrame, FreeSlot, Span, command_rows
from metrale_ray.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot holds on every rank."""

    length: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class Mirror:
    """The settled state of the ranks. `pending` is the command that was sent and has no outcome yet."""

    slots: dict[int, Held] = field(default_factory=dict)
    pending: CommandFrame | None = None

    def sent(self, frame: CommandFrame) -> Iterator[str]:
        """A command goes out. What is wrong about it is given, one line each."""
        self.pending = frame
        seen: set[int] = set()
        owned = {block for held in self.slots.values() for block in held.blocks}
        if isinstance(frame.command, FreeSlot) and frame.command.slot not in self.slots:
            yield f"slot {frame.command.slot} is freed and holds nothing"
        for span in command_rows(frame.command):
            held = self.slots.get(span.slot, Held(0, ()))
            if span.slot in seen:
                yield f"slot {span.slot} is in a command twice"
            if span.start != held.length:
                yield f"slot {span.slot} starts at {span.start} and its settled length is {held.length}"
            if owned.intersection(span.new_blocks):
                yield f"slot {span.slot} gets blocks that have an owner: {sorted(owned.intersection(span.new_blocks))}"
            seen.add(span.slot)
            owned.update(span.new_blocks)

    def settle(self, ok: bool) -> None:
        """The command that was sent had its outcome."""
        frame, self.pending = self.pending, None
        if frame is None or not ok:
            return
        if isinstance(frame.command, FreeSlot):
            self.slots.pop(frame.command.slot, None)
        for span in command_rows(frame.command):
            held = self.slots.get(span.slot, Held(0, ()))
            self.slots[span.slot] = replace(held, length=span.end, blocks=held.blocks + tuple(span.new_blocks))

    def compare_rank(self, rank: int, slots: Slots) -> Iterator[str]:
        """How a rank that has answered the pending command differs, one line each."""
        live = slots._live  # the rank's very state
        rows: Mapping[int, Span] = {}
        if self.pending is not None:
            rows = {span.slot: span for span in command_rows(self.pending.command)}
        for slot in self.slots.keys() - live.keys():
            yield f"rank {rank} has nothing in slot {slot}, which holds {self.slots[slot]}"
        for slot, state in live.items():
            held = self.slots.get(slot, Held(0, ()))
            staged = (*held.blocks, *(rows[slot].new_blocks if slot in rows else ()))
            if slot not in self.slots and slot not in rows:
                yield f"rank {rank} holds slot {slot}, which is free"
            elif state.length != held.length:
                yield f"rank {rank} has length {state.length} in slot {slot}, which is {held.length}"
            elif tuple(state.block_table) not in (held.blocks, staged):
                yield f"rank {rank} has blocks {list(state.block_table)} in slot {slot}, which are {held.blocks}"
        in_tables = [block for state in live.values() for block in state.block_table]
        if len(set(in_tables)) != len(in_tables):
            yield f"rank {rank} has a block in two tables: {sorted(in_tables)}"
        if slots.num_owned_blocks != len(in_tables):
            yield f"rank {rank} takes {slots.num_owned_blocks} blocks for owned and has {len(in_tables)} in its tables"

    def compare_head(self, scheduler: Scheduler) -> Iterator[str]:
        """How the head's pools differ, between two commands of a step whose frees have gone out; one line each."""
        running = {sequence.slot: sequence for sequence in scheduler._running.values()}
        left = set(scheduler._slots._left)
        for slot in self.slots.keys() - running.keys() - left:
            yield f"slot {slot} holds {self.slots[slot]} and nobody will free it"
        for slot, sequence in running.items():
            held = self.slots.get(slot, Held(0, ())) if slot is not None and slot not in left else Held(0, ())
            if sequence.num_computed != held.length:
                yield f"the head has length {sequence.num_computed} for slot {slot}, which is {held.length}"
            if tuple(sequence.blocks[: len(held.blocks)]) != held.blocks:
                yield f"the head has blocks {sequence.blocks} for slot {slot}, which has {held.blocks}"
        yield from pools(scheduler)


def pools(scheduler: Scheduler) -> Iterator[str]:
    """What is wrong with the head's slots and blocks in themselves: each is free, or has exactly one owner."""
    sequences = list(scheduler._running.values())
    owned = [block for sequence in sequences for block in sequence.blocks]
    free = list(scheduler._blocks._free)
    if sorted(owned + free) != list(range(scheduler.num_total_blocks)):
        yield f"of {scheduler.num_total_blocks} blocks {sorted(free)} are free and {sorted(owned)} owned"
    slots = [sequence.slot for sequence in sequences]
    free_slots = list(scheduler._slots._free)
    if sorted([*slots, *free_slots], key=str) != sorted(range(scheduler.limits.max_batch_size), key=str):
        yield f"of {scheduler.limits.max_batch_size} slots {free_slots} are free and {slots} taken"
