# SPDX-License-Identifier: MIT OR Apache-2.0
"""When requests are sent: as answers end, at an average rate with random gaps, or as in a recording.

Rules: times are seconds after the start, in order. Times do not depend on answers, but where a number of clients waits
for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from metrale_ray.traffic.trace import Arrival


@dataclass(frozen=True, slots=True)
class Closed:
    """`num_clients` clients, each of which sends a request when its one before has ended."""

    num_clients: int

    def describe(self) -> dict[str, Any]:
        """What the report says of it."""
        return {"kind": "concurrency", "concurrency": self.num_clients}


@dataclass(frozen=True, slots=True)
class Rate:
    """`per_s` requests a second on average, independent of one another: a Poisson process."""

    per_s: float

    def describe(self) -> dict[str, Any]:
        """What the report says of it."""
        return {"kind": "rate", "rate_per_s": self.per_s}

    def times_s(self, random: Random) -> Iterator[float]:
        """The times of all requests, without an end."""
        now_s = 0.0
        while True:
            now_s += random.expovariate(self.per_s)
            yield now_s


@dataclass(frozen=True, slots=True)
class Recorded:
    """The arrivals of a recording, `speed` times as quick."""

    arrivals: Sequence[Arrival]
    speed: float = 1.0

    def describe(self) -> dict[str, Any]:
        """What the report says of it."""
        return {"kind": "trace", "requests": len(self.arrivals), "speed": self.speed}


Arrivals = Closed | Rate | Recorded
