# SPDX-License-Identifier: MIT OR Apache-2.0
"""`RunningEngine`: an engine that somebody else started on this Ray, as one of its fronts finds it by its name.

Rules: it is found by the name of its head's actor, and asked by Ray calls for the way in, its figures and its end; no
token passes there. Leaving disturbs nobody: the engine ends with whoever started it.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import ray

from metrale_ray.cluster.actors import WayIn
from metrale_ray.cluster.cluster import POLL_S, RAY_GONE, STOP_TIMEOUT_S
from metrale_ray.cluster.endings import first_line, own_error
from metrale_ray.cluster.names import head_of
from metrale_ray.cluster.session import RaySession
from metrale_ray.errors import EngineDead, MetraleError, StartError
from metrale_ray.protocol.keys import new_keys

# How long the head waits with its answer whether it has ended: whoever asked and has gone is forgotten after that.
ASK_S = 30.0


class RunningEngine:
    """Not found yet: see `find`. `front_keys` are this front's own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.front_keys = new_keys()
        self.front_address = ""
        self.head_key = ""
        self.ranks: list[dict[str, Any]] = []
        self._session = RaySession()
        self._head: Any = None
        self._end: Future[EngineDead | None] | None = None  # the head's answer, once it was asked
        self._news = threading.Event()  # the head has answered, or nobody waits any more
        self._is_left = False

    def find(self, address: str, timeout_s: float) -> WayIn:
        """Join the Ray at `address` and ask the engine's head to let this front in.

        `timeout_s`: for an engine that is still starting. Raises UserError when there is none of this name, StartError
        when it is not ready in time, EngineDead when it has ended.
        """
        self._session.join(address)
        self._head = head_of(self.name)
        deadline = time.monotonic() + timeout_s
        while True:
            way = self._ask_way(deadline)
            if way is not None:
                self.front_address, self.head_key, self.ranks = way.front_address, way.head_key, way.ranks
                return way
            time.sleep(POLL_S)

    def wait_ended(self, timeout_s: float) -> EngineDead | None:
        """Wait up to `timeout_s` for the engine's end, and say why it has ended; None while it runs."""
        if not ray.is_initialized():  # asking would start another one
            return EngineDead(RAY_GONE)
        end = self._end or self._ask_end()
        self._news.wait(timeout_s)
        if self._is_left or not end.done():
            return None
        self._end = None
        try:
            return end.result()
        except ray.exceptions.RayError as error:
            return self._gone(error)

    def stats(self) -> dict[str, Any]:
        """The engine's gauges and counters with its ranks. Raises EngineDead."""
        if not ray.is_initialized():
            raise EngineDead(RAY_GONE)
        try:
            numbers: dict[str, Any] = ray.get(self._head.stats.remote(), timeout=STOP_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise self._gone(error) from error
        return {**numbers, "ranks": self.ranks}

    def stop(self) -> None:
        """Nobody waits for the engine's end any more."""
        self._is_left = True
        self._news.set()

    def close(self) -> None:
        """Leave the Ray, if it was joined here. The engine goes on."""
        self._session.leave()

    def _ask_way(self, deadline: float) -> WayIn | None:
        """None while the engine is starting. Raises StartError from `deadline` on."""
        left_s = deadline - time.monotonic()
        try:
            if left_s > 0:
                way: WayIn | None = ray.get(self._head.way_in.remote(self.front_keys.public), timeout=left_s)
                return way
        except ray.exceptions.GetTimeoutError:
            pass  # told below
        except ray.exceptions.RayTaskError as error:
            raise self._named(own_error(error)) from None
        except ray.exceptions.RayError as error:
            raise self._gone(error) from error
        raise StartError(f"the engine {self.name!r} runs and is not ready yet; wait longer (timeout_s)")

    def _ask_end(self) -> Future[EngineDead | None]:
        self._news.clear()
        end: Future[EngineDead | None] = self._head.ended.remote(ASK_S).future()
        self._end = end
        end.add_done_callback(lambda _: self._news.set())
        if self._is_left:  # a moment ago, before the event was cleared
            self._news.set()
        return end

    def _named(self, error: MetraleError) -> MetraleError:
        return type(error)(f"engine {self.name!r}: {error.message}", rank=getattr(error, "rank", None))

    def _gone(self, error: Exception) -> EngineDead:
        return EngineDead(f"the head of engine {self.name!r} has gone: {first_line(error)}", rank=0)
