# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SlotPool`: which slots are free, and which of them the ranks must be told to free.

Rules: the lowest free slot is given first; a slot never moves. The ranks hold a slot from the first step settled in it
until they are told to free it, so a slot in which nothing was settled is free on the ranks already.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from metrale_ray.protocol.commands import Slot


class SlotPool:
    """Slots 0 to `max_batch_size` - 1."""

    def __init__(self, max_batch_size: int) -> None:
        self._free = [Slot(slot) for slot in range(max_batch_size)]  # a heap
        self._held: set[Slot] = set()  # the ranks settled something in these
        self._left: list[Slot] = []  # given back since the last frees

    @property
    def num_free(self) -> int:
        """Slots that can be taken, those that the next plan frees included."""
        return len(self._free)

    def take(self) -> Slot:
        """The lowest free slot. Raises IndexError when none is free."""
        return heapq.heappop(self._free)

    def give_back(self, slot: Slot) -> None:
        """The sequence in `slot` has left. The next plan may use the slot, as its frees go before its rows."""
        heapq.heappush(self._free, slot)
        self._left.append(slot)

    def hold(self, slots: Iterable[Slot]) -> None:
        """Something was settled in these slots on every rank."""
        self._held.update(slots)

    def frees(self) -> tuple[Slot, ...]:
        """The slots given back since the last call which the ranks still hold; they count as freed from now on."""
        frees = tuple(slot for slot in self._left if slot in self._held)
        self._held.difference_update(frees)
        self._left.clear()
        return frees
