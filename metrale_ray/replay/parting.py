# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Parting`: the first command at which two runs of the same commands, A and B, are no longer the same; and logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Tensor = Any  # of torch, which is imported under `model` and `sampling` alone

DEFAULT_TOLERANCE = 1e-3
"""Logits of one model in float32 differ by less, whatever adds them up, and by more as soon as something is wrong."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where, what, and what each of the two has. `cmd` is the command's code, in A where it is another one in B."""

    seq: int
    cmd: int
    field: str
    request_id: int | None
    a: str
    b: str

    def __str__(self) -> str:
        where = "" if self.request_id is None else f"request {self.request_id}: "
        return f"{where}{self.field}: A has {self.a}, B has {self.b}"


@dataclass(slots=True)
class BisectResult:
    """`parting` is None where the two stay within `tolerance` to the end of what both have.

    `largest_gap` is the largest difference of two logits up to there, at command `largest_gap_seq`; None where no
    logits were compared.
    """

    tolerance: float
    num_commands: int = 0
    num_logits: int = 0
    largest_gap: float = 0.0
    largest_gap_seq: int | None = None
    parting: Parting | None = None
    remarks: list[str] = field(default_factory=list)

    def note_gap(self, seq: int, gap: float, num_logits: int) -> bool:
        """Whether a command whose logits differ by up to `gap` is beyond the tolerance."""
        self.num_logits += num_logits
        if num_logits and (self.largest_gap_seq is None or gap > self.largest_gap):
            self.largest_gap, self.largest_gap_seq = gap, seq
        return gap > self.tolerance


def logit_gaps(a_RV: Tensor, b_RV: Tensor) -> Tensor:
    """By how much two logits at one place differ, on the CPU; infinite where only one of the two is a number.

    Both are fp32 [R, V], on any device.
    """
    a_RV, b_RV = a_RV.cpu(), b_RV.cpu()
    is_same_RV = (a_RV == b_RV) | (a_RV.isnan() & b_RV.isnan())
    return (a_RV - b_RV).abs().masked_fill(is_same_RV, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)


def largest_gap(recorded: Sequence[float], found: Sequence[float]) -> float:
    """The largest difference of two numbers at one place; infinite where only one is a number."""
    gaps = [_gap(a, b) for a, b in zip(recorded, found, strict=False)]
    return max(gaps, default=0.0) if len(recorded) == len(found) else math.inf


def _gap(recorded: float, found: float) -> float:
    if recorded == found or (math.isnan(recorded) and math.isnan(found)):
        return 0.0
    gap = abs(recorded - found)
    return math.inf if math.isnan(gap) else gap
