# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Lag`: whether this process keeps up with what it measures.

A task sleeps for a short time again and again and notes how much later than due it wakes: so late does everything else
here, too. With the share of a core that this process took, it says whether the client was the limit.
"""

from __future__ import annotations

import asyncio
import time
from array import array

PERIOD_S = 0.05
# A read that comes so late shows in a time to first token; and a process that runs most of the time is near its end.
MAX_LAG_S = 0.02
MAX_CPU_SHARE = 0.85
MIN_LAGS = 10  # half a second: in less even a start is late


class Lag:
    """Watches the running loop from `watch` until that is cancelled."""

    def __init__(self) -> None:
        self.lags_s = array("d")
        self._cpu_start_s = time.process_time()
        self._start_s = time.perf_counter()

    async def watch(self) -> None:
        """Note how late the loop is, for good."""
        while True:
            due_s = time.perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.lags_s.append(max(0.0, time.perf_counter() - due_s))

    @property
    def cpu_s(self) -> float:
        """The processor's time that this process took since the start."""
        return time.process_time() - self._cpu_start_s

    @property
    def cpu_share(self) -> float:
        """The same as a share of one core."""
        passed_s = time.perf_counter() - self._start_s
        return self.cpu_s / passed_s if passed_s > 0 else 0.0


def is_bottleneck(lag_p99_s: float | None, cpu_share: float) -> bool:
    """Whether figures say more about this client than about the server. None: the run was too short to tell."""
    return lag_p99_s is not None and (lag_p99_s > MAX_LAG_S or cpu_share > MAX_CPU_SHARE)
