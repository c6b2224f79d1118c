# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Scrubbing`: which part of the weights, and which slot's cache rows, the next scrub reads. Pure.

Rules: parts follow one another, so a pass reads all weights of all ranks once; slots take turns. It leaves out when a
scrub is ordered, and what its verdict means: damage has raised Desync by then, and one that failed is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from metrale_ray.protocol.commands import Scrub, Slot


class Scrubbing:
    """Over `num_parts` parts, those of rank 0's model."""

    def __init__(self, num_parts: int) -> None:
        self.num_passes = 0  # over all parts, so far
        self._num_parts = num_parts
        self._part = 0
        self._slot = Slot(0)

    def next(self, slots: Iterable[Slot] = ()) -> Scrub:
        """The next scrub. `slots` have settled tokens, and no command that frees them has been ordered."""
        part, self._part = self._part, (self._part + 1) % self._num_parts
        self.num_passes += self._part == 0
        return Scrub(part, self._num_parts, self._next_slot(sorted(slots)))

    def _next_slot(self, slots: list[Slot]) -> Slot | None:
        """The lowest one that has not had its turn, or the lowest of all."""
        if not slots:
            return None
        chosen = next((slot for slot in slots if slot >= self._slot), slots[0])
        self._slot = Slot(chosen + 1)
        return chosen
