# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Chores`: what an engine does beside its steps: it looks at its links, pings, and scrubs.

Rules: an idle engine looks at its links at once and pings now and then. With `scrub` a part of the ranks' memory is
looked at while there is nothing else to do; and under load too, for at most 1 / BUSY_SHARE of the time, since the cache
of live sequences is there to be looked at only then. The engine's thread makes every call.
"""

from __future__ import annotations

from collections.abc import Callable

from metrale_ray.clock import Clock
from metrale_ray.config import EngineConfig
from metrale_ray.engine import Engine

IDLE_WAIT_S = 0.25
"""An idle engine looks at its links this often; a message wakes it at once."""

IDLE_SHARE = 5
"""An idle engine scrubs for a fifth of its time: whoever sends a request meanwhile waits for one part at most."""

BUSY_SHARE = 250
"""An engine at work scrubs for less than half a percent of its time."""

MIN_REST_S = 0.02
"""Between two parts, however quick they are."""

PASS_REST_S = 60.0
"""How long after the last of all parts the next pass begins, while the engine is idle."""


class Chores:
    """Of one engine. `check_links` raises LinkLost when a worker has gone."""

    def __init__(self, engine: Engine, config: EngineConfig, check_links: Callable[[], None], clock: Clock) -> None:
        self._engine = engine
        self._check_links = check_links
        self._clock = clock
        self._ping_s = config.idle_ping_s
        self._scrubs = config.scrub
        self._next_ping_s = clock() + self._ping_s
        self._next_scrub_s = clock()
        self._busy_scrub_s = clock()

    @property
    def wait_s(self) -> float:
        """How long an idle engine may wait for something to do."""
        if not self._scrubs:
            return IDLE_WAIT_S
        return min(IDLE_WAIT_S, max(0.0, self._next_scrub_s - self._clock()))

    def after_step(self) -> None:
        """The engine has just done something. Raises LinkLost or Desync."""
        self._next_ping_s = self._clock() + self._ping_s
        if self._scrubs and self._clock() >= self._busy_scrub_s:
            self._scrub()

    def while_idle(self) -> None:
        """There was nothing to do. Raises LinkLost or Desync."""
        self._check_links()
        if self._scrubs and self._clock() >= self._next_scrub_s:
            self._scrub()
        if self._clock() >= self._next_ping_s:
            self._engine.ping()
            self._next_ping_s = self._clock() + self._ping_s

    def _scrub(self) -> None:
        began_s = self._clock()
        has_passed = self._engine.scrub()
        now_s = self._clock()
        took_s = now_s - began_s
        self._next_scrub_s = now_s + (PASS_REST_S if has_passed else max(MIN_REST_S, IDLE_SHARE * took_s))
        self._busy_scrub_s = now_s + BUSY_SHARE * took_s
