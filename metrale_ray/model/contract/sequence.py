# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SequenceState`: a rank's mirror of one sequence. It decides nothing; commands change it."""

from __future__ import annotations

from dataclasses import dataclass, field

from metrale_ray.protocol.commands import BlockId, Slot


@dataclass(slots=True)
class SequenceState:
    """`length` is settled; KV rows past it are scratch. `block_table` includes the blocks of the step under way.

    `life` counts the sequences that this slot has held, from 0: with the slot it names one sequence on every rank.
    """

    slot: Slot
    life: int
    length: int = 0
    block_table: list[BlockId] = field(default_factory=list)
