# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Figures`: the head's figures as one document of plain numbers, texts and lists, for `Told`, metrics and people.

Rules. Any thread may ask for the document at any moment: while the engine loads, computes, hangs or has ended. So it
reads plain numbers that the engine's thread leaves behind, and waits for nothing. Each number is right by itself; two
of them may be of moments a step apart.

`has_work`: a sequence waits or runs, or a command is under way, while the engine is ready. `progress_age_s`: while
there is work, the seconds since a command last completed on every rank, or since the engine last had nothing to do, if
that was later; 0 without work, and before and after the engine is ready.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from metrale_ray.engine import Engine
from metrale_ray.errors import MetraleError
from metrale_ray.protocol.commands import Progress

Document = dict[str, Any]


class Figures:
    """What is told of an engine of `num_ranks` ranks in its life `epoch`."""

    def __init__(self, num_ranks: int, epoch: int) -> None:
        self._num_ranks = num_ranks
        self._epoch = epoch
        self._started_at_s = time.monotonic()
        self._idle_at_s = self._started_at_s
        self._places: dict[int, Mapping[str, Any]] = {}

    def note_places(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Where each rank is: maps with `rank`, and `pid`, `node` and `address` as far as they are known."""
        self._places = {int(place["rank"]): place for place in places}

    def note_idle(self, now_s: float) -> None:
        """The engine has nothing to do (monotonic clock)."""
        self._idle_at_s = now_s

    def document(
        self,
        phase: str,
        loading: Mapping[int, Progress],
        failure: MetraleError | None,
        engine: Engine | None,
        num_arrived: int,
    ) -> Document:
        """The figures now. `phase`, `loading` and `failure` are the head's; `num_arrived` sequences are on their way
        to the engine."""
        is_ready = engine is not None and phase == "ready"
        running = engine.scheduler.num_running if engine is not None and is_ready else 0
        waiting = engine.scheduler.num_waiting + num_arrived if engine is not None and is_ready else 0
        command = engine.counters.command if engine is not None and is_ready else None
        has_work = bool(running or waiting or command)
        return {
            "phase": phase,
            "why": failure.message if failure is not None else None,
            "epoch": self._epoch,
            "uptime_s": round(time.monotonic() - self._started_at_s, 3),
            "has_work": has_work,
            "progress_age_s": self._progress_age_s(engine) if engine is not None and has_work else 0.0,
            "command": command,
            "running": running,
            "waiting": waiting,
            "ranks": [self._rank(rank, phase, loading.get(rank), failure) for rank in range(self._num_ranks)],
        }

    def _progress_age_s(self, engine: Engine) -> float:
        moved_at_s = max(engine.counters.completed_at_s, self._idle_at_s)
        return round(max(0.0, time.monotonic() - moved_at_s), 3)

    def _rank(self, rank: int, phase: str, progress: Progress | None, failure: MetraleError | None) -> Document:
        place = self._places.get(rank, {})
        is_at_fault = failure is not None and getattr(failure, "rank", None) == rank
        return {
            "rank": rank,
            "state": "failed" if is_at_fault else phase,
            "pid": place.get("pid"),
            "node": place.get("node"),
            "address": place.get("address"),
            "loaded_bytes": progress.done_bytes if progress is not None else None,
            "total_bytes": progress.total_bytes if progress is not None else None,
        }


def document_text(document: Document) -> str:
    """`document` as JSON, for `Told`."""
    return json.dumps(document, separators=(",", ":"))
