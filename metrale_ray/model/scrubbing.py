# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Scrubbing`: which part of the weights, and which rows of which slot's cache, the next scrub reads. Pure.

Rules: parts follow one another, so a pass reads all weights of all ranks once; slots take turns, and each goes on
where it was left. It leaves out when a scrub is ordered, and what its verdict means: damage has raised Desync by then,
and one that failed is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from metrale_ray.model.contract.agreement import MAX_SCRUB_ROWS
from metrale_ray.protocol.commands import Scrub, Slot


class Scrubbing:
    """Over `num_parts` parts, those of rank 0's model."""

    def __init__(self, num_parts: int) -> None:
        self.num_passes = 0  # over all parts, so far
        self._num_parts = num_parts
        self._part = 0
        self._slot = Slot(0)  # whose turn is next, or that of the first one above it
        self._starts: dict[Slot, int] = {}  # where each slot goes on

    def next(self, lengths: Mapping[Slot, int]) -> Scrub:
        """The next scrub. `lengths`: settled tokens, at least one, of slots that no ordered command frees."""
        slot = self._next_slot(lengths)
        return self._scrub(None if slot is None else (slot, self._next_start(slot, lengths[slot])))

    def all_of(self, slot: Slot, length: int) -> Iterator[Scrub]:
        """Scrubs that together read all settled rows of a slot; parts go on with each that is taken."""
        for start in range(0, length, MAX_SCRUB_ROWS):
            yield self._scrub((slot, start))

    def _scrub(self, rows: tuple[Slot, int] | None) -> Scrub:
        part, self._part = self._part, (self._part + 1) % self._num_parts
        self.num_passes += self._part == 0
        return Scrub(part, self._num_parts) if rows is None else Scrub(part, self._num_parts, *rows)

    def _next_slot(self, lengths: Mapping[Slot, int]) -> Slot | None:
        """The lowest one that has not had its turn, or the lowest of all."""
        if not lengths:
            return None
        slots = sorted(lengths)
        chosen = next((slot for slot in slots if slot >= self._slot), slots[0])
        self._slot = Slot(chosen + 1)
        return chosen

    def _next_start(self, slot: Slot, length: int) -> int:
        start = self._starts.get(slot, 0)
        start = start if start < length else 0  # it came to the end, or another sequence has the slot
        self._starts[slot] = start + MAX_SCRUB_ROWS
        return start
