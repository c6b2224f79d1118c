# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ladder of decode batch sizes, so that captured graphs have few shapes. What is not captured is not padded."""

from __future__ import annotations

from bisect import bisect_left

DECODE_BATCH_LADDER = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def padded_batch_n(n: int) -> int:
    """The smallest rung of at least `n` rows, and `n` itself above the ladder. Raises ValueError below 1."""
    if n < 1:
        raise ValueError(f"a batch has at least one row, not {n}")
    rung = bisect_left(DECODE_BATCH_LADDER, n)
    return DECODE_BATCH_LADDER[rung] if rung < len(DECODE_BATCH_LADDER) else n
