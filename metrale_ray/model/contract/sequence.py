# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SequenceState`: a rank's mirror of one sequence. It decides nothing; commands change it."""

from __future__ import annotations

from dataclasses import dataclass, field

from metrale_ray.protocol.commands import BlockId, Slot


@dataclass(slots=True)
class SequenceState:
    """`length` is settled; KV rows past it are scratch. `block_table` includes the blocks of the step under way."""

    slot: Slot
    length: int = 0
    block_table: list[BlockId] = field(default_factory=list)
