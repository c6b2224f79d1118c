# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Figures`: the head's figures as one document of plain numbers, texts and lists, for `Told`, metrics and people.

Rules. Any thread may ask for the document at any moment: while the engine loads, computes, hangs or has ended. So it
reads plain numbers that the engine's thread leaves behind, and waits for nothing. Each number is right by itself; two
of them may be of moments a step apart, so that a sequence on its way from one place to the next may be seen in both.
Counts and seconds are sums since the engine's start. What is not known yet, or does not exist, is null, 0 or empty;
every key is always there.

`has_work`: a sequence has arrived and not ended, or a command is under way, while the engine is ready.
`progress_age_s`: while there is work, the seconds since a command last completed on every rank, or since the engine
last had nothing to do, if that was later; 0 without work, and before and after the engine is ready.

    phase, why, epoch, uptime_s      starting, loading, ready or ended, and why it ended
    has_work, progress_age_s, command   see above; command is the name of the one under way
    running, waiting                 sequences with a slot and without; those that have just arrived wait too
    cache                            blocks of the KV cache, and those that are free
    preemptions, expired             sequences that lost their slot for a time; those whose time was up
    prompt_tokens, generation_tokens     of prompts that were computed to their end; sampled
    finished, rejected               sequences that ended, by reason; requests that were not taken, by the error's code
    seconds                          `timelines`: queue, prefill, decode, end_to_end as histograms
    commands                         by name: `counters.CommandCounters`
    ranks                            `counters.RankCounters` of each, its state, place, load and experts
    digest, digest_mismatches        of the settled state; replies that had another one
    collectives                      sums between the ranks: how many, the bytes of one rank's part, seconds in them
    expert_tokens                    by expert: tokens that it was chosen for, over all layers, failed steps included
    fronts, refused_strangers        open sessions; frames and connections that were refused
    journal                          null where there is none: whether it is on, why not, and records that were let go
    left_out                         keys whose values were too large to be told
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from metrale_ray.clock import Clock
from metrale_ray.counters import CommandCounters, RankCounters
from metrale_ray.engine import Engine
from metrale_ray.errors import MetraleError
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.experts.placement import experts_of
from metrale_ray.protocol.commands import Cmd, Progress
from metrale_ray.protocol.fields import cut_text
from metrale_ray.protocol.front.messages import MAX_DOCUMENT_CHARS
from metrale_ray.protocol.journal.journal import JournalState
from metrale_ray.protocol.limits import MAX_ERROR_CHARS
from metrale_ray.timelines import Timelines

Document = dict[str, Any]

_LARGE = ("expert_tokens", "ranks", "commands", "rejected")
"""What is left out of a document that is too large, in this order."""


@dataclass(frozen=True, slots=True)
class HeadView:
    """The head at one moment, besides its engine's own numbers.

    `loading`: progress by rank. `num_arrived` sequences are on their way to the engine, `num_dropped` were when their
    front went. `refused`: requests that the head did not take, by code, besides those that the engine did not.
    """

    phase: str
    loading: Mapping[int, Progress] = field(default_factory=dict)
    failure: MetraleError | None = None
    engine: Engine | None = None
    collectives: Collectives | None = None
    num_arrived: int = 0
    num_dropped: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    num_fronts: int = 0
    num_strangers: int = 0
    journal: JournalState | None = None

    @property
    def failed_rank(self) -> int | None:
        """The rank at fault, where one is."""
        return getattr(self.failure, "rank", None)


class Figures:
    """What is told of an engine of `num_ranks` ranks in its life `epoch`."""

    def __init__(self, num_ranks: int, epoch: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._num_ranks = num_ranks
        self._epoch = epoch
        self._started_at_s = self._clock()
        self._idle_at_s = self._started_at_s
        self._places: dict[int, Mapping[str, Any]] = {}

    def note_places(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Where each rank is: maps with `rank`, and `pid`, `node` and `address` as far as they are known."""
        self._places = {int(place["rank"]): place for place in places}

    def note_idle(self, now_s: float) -> None:
        """The engine has nothing to do (monotonic clock)."""
        self._idle_at_s = now_s

    def document(self, view: HeadView) -> Document:
        """The figures now."""
        engine, failure, collectives = view.engine, view.failure, view.collectives
        expert_tokens = engine.expert_tokens() if engine is not None else []
        return {
            "phase": view.phase,
            "why": cut_text(failure.message, MAX_ERROR_CHARS) if failure is not None else None,
            "epoch": self._epoch,
            "uptime_s": round(self._clock() - self._started_at_s, 3),
            **self._work(view),
            **(_no_engine() if engine is None else _of_engine(engine)),
            **_requests(view),
            "ranks": [self._rank(rank, view, len(expert_tokens)) for rank in range(self._num_ranks)],
            "collectives": {"all_reduce": _sums(collectives)},
            "expert_tokens": expert_tokens,
            "fronts": view.num_fronts,
            "refused_strangers": view.num_strangers,
            "journal": None if view.journal is None else view.journal._asdict(),
            "left_out": [],
        }

    def _work(self, view: HeadView) -> Document:
        engine = view.engine if view.phase == "ready" else None
        if engine is None:
            return {"has_work": False, "progress_age_s": 0.0, "command": None, "running": 0, "waiting": 0}
        command = engine.counters.command
        has_work = bool(view.num_arrived or len(engine.timelines) or command is not None)
        return {
            "has_work": has_work,
            "progress_age_s": self._progress_age_s(engine) if has_work else 0.0,
            "command": command.name.lower() if command is not None else None,
            "running": engine.scheduler.num_running,
            "waiting": engine.scheduler.num_waiting + view.num_arrived,
        }

    def _progress_age_s(self, engine: Engine) -> float:
        moved_at_s = max(engine.counters.completed_at_s, self._idle_at_s)
        return round(max(0.0, self._clock() - moved_at_s), 3)

    def _rank(self, rank: int, view: HeadView, num_experts: int) -> Document:
        place, progress = self._places.get(rank, {}), view.loading.get(rank)
        counters = view.engine.counters.by_rank[rank] if view.engine is not None else RankCounters()
        experts = experts_of(num_experts, rank, self._num_ranks)
        return {
            "rank": rank,
            "state": "failed" if view.failed_rank == rank else view.phase,
            "pid": place.get("pid"),
            "node": place.get("node"),
            "address": place.get("address"),
            "loaded_bytes": progress.done_bytes if progress is not None else None,
            "total_bytes": progress.total_bytes if progress is not None else None,
            "first_expert": experts.start,
            "num_experts": len(experts),
            **asdict(counters),
        }


def document_text(document: Document) -> str:
    """`document` as JSON that `Told` may carry: what is too large for it is left out, and named."""
    left_out: list[str] = []
    text = _dumped(document)
    for key in _LARGE:
        if len(text) <= MAX_DOCUMENT_CHARS:
            break
        left_out.append(key)
        document = {**document, key: type(document[key])(), "left_out": left_out}
        text = _dumped(document)
    return text


def _dumped(document: Document) -> str:
    return json.dumps(document, separators=(",", ":"))


def _of_engine(engine: Engine) -> Document:
    scheduler, counters, timelines = engine.scheduler, engine.counters, engine.timelines
    return {
        "cache": {"total_blocks": scheduler.num_total_blocks, "free_blocks": scheduler.num_free_blocks},
        "preemptions": scheduler.num_preemptions,
        "expired": counters.expired_requests,
        "prompt_tokens": timelines.num_prompt_tokens,
        "generation_tokens": counters.tokens,
        "seconds": timelines.document(),
        "commands": {code.name.lower(): counters.of_command(code).document() for code in Cmd},
        "digest": engine.digest,
        "digest_mismatches": counters.digest_mismatches,
    }


def _no_engine() -> Document:
    return {
        "cache": {"total_blocks": 0, "free_blocks": 0},
        "preemptions": 0,
        "expired": 0,
        "prompt_tokens": 0,
        "generation_tokens": 0,
        "seconds": Timelines().document(),
        "commands": {code.name.lower(): CommandCounters().document() for code in Cmd},
        "digest": None,
        "digest_mismatches": 0,
    }


def _requests(view: HeadView) -> Document:
    engine = view.engine
    rejected = dict(view.refused)
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    if engine is not None:
        finished = dict(engine.timelines.finished)
        for code, count in dict(engine.counters.by_refusal).items():
            rejected[code] = rejected.get(code, 0) + count
    finished["abort"] += view.num_dropped
    return {"finished": finished, "rejected": rejected}


def _sums(collectives: Collectives | None) -> Document:
    if collectives is None:
        return {"count": 0, "bytes": 0, "seconds": 0.0}
    return {"count": collectives.num_sums, "bytes": collectives.num_bytes, "seconds": collectives.sums_s}
