# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Histogram`: how often a value fell between which bounds, as plain counts.

One thread observes and any may read: what is read may be of a moment in the middle of an observation, so that count
and sum differ by one value.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
"""The upper bounds that vLLM has for the phases of a request, so that its dashboards fit."""


class Histogram:
    """`bounds_s` are upper bounds in seconds, rising, each inclusive; what is above the last one is counted too."""

    def __init__(self, bounds_s: tuple[float, ...] = REQUEST_BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """One value."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def document(self) -> dict[str, Any]:
        """`counts` has the values up to each of `bounds_s` and above the one before, and last those above all."""
        return {"bounds_s": list(self._bounds_s), "counts": list(self._counts), "sum_s": self._sum_s}
