# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SequenceState`: a rank's mirror of one sequence. It decides nothing; commands change it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from metrale_ray.protocol.commands import Slot


@dataclass(slots=True)
class SequenceState:
    """`length` is settled; KV rows past it are scratch. `block_table` includes the blocks of the step under way.

    The table is an array of u32, because its bytes are read at each command to prove that all ranks have the same.
    """

    slot: Slot
    length: int = 0
    block_table: array[int] = field(default_factory=lambda: array("I"))
