# SPDX-License-Identifier: MIT OR Apache-2.0
"""`BlameSearch`: finds the row that makes a step fail, by running parts of the failed step.

Rules:
- Slots that a failed reply names are guilty at once, and the search ends; the other rows are planned again.
- Otherwise the suspects are halved, prefill rows first, until one row fails alone. Rows that succeed are settled by
  the caller, so the search also does work. One guilty row among n is found within ceil(log2(n)) + 2 steps.
- A row is convicted when it failed alone and, if there were others, some step without it succeeded. If no step
  succeeds at all and all rows fail on one rank, it is that rank; if they fail on different ranks, it is the rows.
- The search ends after `deadline_steps` steps: if some step succeeded, with the rows that failed alone, and the others
  are planned again; else with the blame on the rank that failed last.

Pure: the caller runs the rows. Nothing is admitted while a search runs, as the caller plans no step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from metrale_ray.protocol.commands import Slot
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import RequestId

Rows = dict[RequestId, PlanRow]  # in the order in which they are to be tried


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a search ended.

    `guilty`: requests to fail. `rank_at_fault`: the rank to replace, or None. `nobody`: every row succeeded in the
    end. All three are empty when every row was dropped before the search knew.
    """

    guilty: tuple[RequestId, ...] = ()
    rank_at_fault: int | None = None
    nobody: bool = False


class BlameSearch:
    """A search over the rows of a step that failed on some rank.

    The caller may first report that step's own failure with `failed`. Then it alternates: `next_rows`, run them,
    `succeeded` or `failed`, until `next_rows` gives None; `verdict` is set from then on. Raises ValueError for no rows
    or no steps, RuntimeError for a report on rows that are not under way.
    """

    def __init__(self, rows: Sequence[PlanRow], deadline_steps: int) -> None:
        if not rows or deadline_steps < 1:
            raise ValueError(f"{len(rows)} rows and {deadline_steps} steps given; a search needs at least one of each")
        prefill_first = sorted(rows, key=lambda row: row.is_decode)
        self._suspects: Rows = {row.request_id: row for row in prefill_first}  # they failed together, or so it seems
        self._unknown: Rows = {}  # set aside: some may be guilty too
        self._failed_alone: dict[RequestId, int] = {}  # with the rank on which each failed
        self._dropped: set[RequestId] = set()
        self._under_way: tuple[PlanRow, ...] | None = None
        self._first_step: tuple[PlanRow, ...] | None = tuple(prefill_first)  # its failure may be reported, once
        self._steps_left = deadline_steps
        self._has_success = False
        self._last_rank: int | None = None
        self._verdict: Verdict | None = None
        if len(rows) == 1:
            self._verdict = Verdict(guilty=(rows[0].request_id,))

    @property
    def verdict(self) -> Verdict | None:
        """The end of the search, or None while it goes on."""
        return self._verdict

    def next_rows(self) -> tuple[PlanRow, ...] | None:
        """The rows to run next, or None when there is a verdict."""
        self._conclude_if_done()
        if self._verdict is not None:
            return None
        if not self._suspects:
            rows = tuple(self._unknown.values())
            if len(self._failed_alone) > 1 and not self._has_success:
                rows = rows[-1:]  # is the rank sound at all? one row, the one put aside last, tells soonest
        else:
            rows = tuple(self._suspects.values())[: (len(self._suspects) + 1) // 2]
        self._under_way, self._first_step = rows, None
        return rows

    def succeeded(self) -> None:
        """The rows last given succeeded on every rank, and are settled."""
        rows = self._take_under_way()
        self._has_success = True
        _remove(rows, self._suspects, self._unknown)
        self._conclude_if_done()

    def failed(self, rank: int, blamed_slots: Sequence[Slot] | None) -> None:
        """The rows last given failed on `rank`. `blamed_slots` are the slots that it blames; None or empty: unknown."""
        rows, is_first = self._first_step, self._first_step is not None
        self._first_step = None
        if rows is None:
            rows = self._take_under_way()
        self._last_rank = rank
        named = tuple(row.request_id for row in rows if row.span.slot in (blamed_slots or ()))
        if named:
            self._verdict = Verdict(guilty=self._live(self._convicted() + named))
        elif not is_first:
            self._narrow(rows, rank)
            self._conclude_if_done()

    def drop(self, request_id: RequestId) -> None:
        """The request has ended meanwhile: its row is not run again and cannot be guilty."""
        self._dropped.add(request_id)
        for rows in (self._suspects, self._unknown):
            rows.pop(request_id, None)

    def _take_under_way(self) -> tuple[PlanRow, ...]:
        rows, self._under_way = self._under_way, None
        if rows is None:
            raise RuntimeError("no rows are under way: call next_rows first")
        self._steps_left -= 1
        return rows

    def _narrow(self, rows: tuple[PlanRow, ...], rank: int) -> None:
        """These rows failed together: look among them, and put all the others aside."""
        live = {row.request_id: row for row in rows if row.request_id not in self._dropped}
        _remove(rows, self._suspects, self._unknown)
        self._unknown |= self._suspects
        self._suspects = live
        if len(rows) == 1:
            self._failed_alone[rows[0].request_id] = rank
            self._suspects = {}

    def _conclude_if_done(self) -> None:
        if self._verdict is not None:
            return
        if not self._suspects and not self._unknown:
            self._verdict = self._final_verdict()
        elif self._steps_left <= 0:
            rank_at_fault = None if self._has_success else self._last_rank
            self._verdict = Verdict(guilty=self._convicted(), rank_at_fault=rank_at_fault)

    def _final_verdict(self) -> Verdict:
        """No row is left: each one succeeded, failed alone, or was dropped."""
        if not self._failed_alone:
            return Verdict(nobody=self._has_success)
        one_rank = len(set(self._failed_alone.values())) == 1
        if self._has_success or len(self._failed_alone) == 1 or not one_rank:
            return Verdict(guilty=self._live(self._failed_alone))
        return Verdict(rank_at_fault=self._last_rank)

    def _convicted(self) -> tuple[RequestId, ...]:
        return self._live(self._failed_alone) if self._has_success else ()

    def _live(self, request_ids: Iterable[RequestId]) -> tuple[RequestId, ...]:
        return tuple(request_id for request_id in request_ids if request_id not in self._dropped)


def _remove(rows: Iterable[PlanRow], *groups: Rows) -> None:
    for row in rows:
        for group in groups:
            group.pop(row.request_id, None)
