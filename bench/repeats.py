# SPDX-License-Identifier: MIT OR Apache-2.0
"""Doing a measurement again: so many times, and once more for each that other processes disturbed.

Leaves out what is measured. Works in any Python that a peer may have.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bench.load import OtherLoad

T = TypeVar("T")

QUIET_VARIABLE = "BENCH_QUIET_S"
QUIET_S = 60.0  # waited for at most, before each repeat


@dataclass(frozen=True)
class Repeat(Generic[T]):
    """What one repeat gave, and the cores that others kept busy meanwhile."""

    value: T
    others: float
    is_disturbed: bool


def repeat(once: Callable[[], T], count: int, watch: Callable[[], OtherLoad] = OtherLoad) -> list[Repeat[T]]:
    """`count` repeats. A disturbed one is done again, `2 * count` at most in all; the least disturbed are kept."""
    measured: list[Repeat[T]] = []
    while len(measured) < 2 * count and sum(not one.is_disturbed for one in measured) < count:
        wait_quiet(watch=watch)
        with watch() as load:
            value = once()
        measured.append(Repeat(value, load.cores, load.is_disturbed))
    return sorted(measured, key=lambda one: one.others if one.is_disturbed else 0.0)[:count]


def wait_quiet(
    limit_s: float | None = None,
    watch: Callable[[], OtherLoad] = OtherLoad,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until others let the machine alone for half a second; False when they did not within `limit_s`."""
    limit_s = float(os.environ.get(QUIET_VARIABLE, QUIET_S)) if limit_s is None else limit_s
    waited_s = 0.0
    while waited_s < limit_s:
        with watch() as load:
            sleep(0.5)
        if not load.is_disturbed:
            return True
        waited_s += 0.5
    return False


@dataclass(frozen=True)
class Spread:
    """The median of some repeats, with the lowest and the highest."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 1) -> str:
        """For a cell of a table."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of them do not exceed, the lowest such one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
