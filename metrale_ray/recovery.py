# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Recovery`: what follows a failed step: the search for its rows at fault, and what becomes of their requests.

Rules: `scheduler.blame` decides who is guilty, from parts of the step that the engine runs. A guilty request is failed
with what was said of it last; one whose slot was poisoned is first freed on every rank and prefilled anew, once. A
rank that fails whatever it is given is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from metrale_ray.errors import EpCommandFailed, LinkLost, SlotPoisoned
from metrale_ray.live import LiveRequest
from metrale_ray.protocol.verdict import Kind, Verdict
from metrale_ray.scheduler.blame import BlameSearch
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import RequestId
from metrale_ray.scheduler.scheduler import Scheduler

# A search for the failing row that takes more steps than this ends with the rank at fault.
MAX_BLAME_STEPS = 64


class Guilty(NamedTuple):
    """A request to fail, and what its client is told."""

    request_id: RequestId
    code: str
    message: str


class Recovery:
    """The search that is under way, or none. `live` are the engine's requests."""

    def __init__(self, live: Mapping[RequestId, LiveRequest]) -> None:
        self._live = live
        self._search: BlameSearch | None = None
        self._failures: dict[RequestId, Verdict] = {}  # during a search: the last failed step of each row

    @property
    def is_under_way(self) -> bool:
        """Whether a search has not ended."""
        return self._search is not None

    def begin(self, rows: Sequence[PlanRow], verdict: Verdict) -> None:
        """The step of `rows` failed as a whole."""
        self._search = BlameSearch(rows, MAX_BLAME_STEPS)
        self._note_failed(self._search, rows, verdict)

    def next_rows(self) -> tuple[PlanRow, ...] | None:
        """The rows to run next, decode rows first as in every command; None when the search knows enough."""
        rows = self._search.next_rows() if self._search is not None else None
        return None if rows is None else tuple(sorted(rows, key=lambda row: not row.is_decode))

    def ran(self, rows: Sequence[PlanRow], verdict: Verdict) -> None:
        """What came of the rows last given."""
        if self._search is None:
            return
        if verdict.ok:
            self._search.succeeded()
        else:
            self._note_failed(self._search, rows, verdict)

    def drop(self, request_id: RequestId) -> None:
        """The request has ended meanwhile."""
        if self._search is not None:
            self._search.drop(request_id)

    def conclude(self, scheduler: Scheduler) -> list[Guilty]:
        """The requests to fail, once the search has ended; none before. Raises LinkLost for a rank at fault."""
        verdict = self._search.verdict if self._search is not None else None
        if verdict is None:
            return []
        failures, self._failures, self._search = self._failures, {}, None
        if verdict.rank_at_fault is not None:
            said = [failure.message for failure in failures.values() if failure.rank == verdict.rank_at_fault]
            raise LinkLost(
                f"rank {verdict.rank_at_fault} fails whatever it is given: {said[-1] if said else 'no reason given'}",
                rank=verdict.rank_at_fault,
            )
        if verdict.nobody:
            scheduler.failure_unexplained()
        guilty = [self._punish(scheduler, request_id, failures[request_id]) for request_id in verdict.guilty]
        return [each for each in guilty if each is not None]

    def _note_failed(self, search: BlameSearch, rows: Sequence[PlanRow], verdict: Verdict) -> None:
        self._failures.update((row.request_id, verdict.of_slot(row.span.slot)) for row in rows)
        search.failed(verdict.rank or 0, verdict.slots)

    def _punish(self, scheduler: Scheduler, request_id: RequestId, failure: Verdict) -> Guilty | None:
        live = self._live.get(request_id)
        if live is None:
            return None  # its client has gone meanwhile
        if failure.kind is Kind.POISONED and not live.was_poisoned:
            live.was_poisoned = True
            scheduler.requeue(request_id)
            return None
        return Guilty(request_id, _client_code(failure), failure.message)


def _client_code(verdict: Verdict) -> str:
    """What the client is told: that its command was refused, or that it failed."""
    match verdict.kind:
        case Kind.REJECTED:
            return verdict.code
        case Kind.POISONED:
            return SlotPoisoned.code
        case _:
            return EpCommandFailed.code
