# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/blame.py`: who is found guilty, in how many steps, and who never is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.protocol.commands import Slot
from metrale_ray.scheduler.blame import BlameSearch, Verdict
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import RequestId
from tests.scheduler.scheduler_cases import a_row

RANK = 3
Fails = Callable[[tuple[PlanRow, ...]], bool]


def rows_of(num_rows: int, num_prefill: int = 0) -> list[PlanRow]:
    """Decode rows first, as in a plan; ids and slots are 0, 1, 2, ..."""
    num_decode = num_rows - num_prefill
    return [a_row(i) if i < num_decode else a_row(i, 0, 5) for i in range(num_rows)]


def holds_any(guilty: Collection[int]) -> Fails:
    return lambda rows: any(row.request_id in guilty for row in rows)


def run(search: BlameSearch, fails: Fails) -> tuple[Verdict, list[tuple[PlanRow, ...]]]:
    """Run a search to its verdict; also the rows of each step."""
    steps = []
    while (rows := search.next_rows()) is not None:
        steps.append(rows)
        if fails(rows):
            search.failed(RANK, None)
        else:
            search.succeeded()
    assert search.verdict is not None
    return search.verdict, steps


def test_one_guilty_row_of_any_number_at_any_place_is_found_within_the_bound() -> None:
    for num_rows in range(1, 129):
        rows = rows_of(num_rows, num_rows // 3)
        for guilty in range(num_rows):
            verdict, steps = run(BlameSearch(rows, 64), holds_any({guilty}))
            assert verdict == Verdict(guilty=(RequestId(guilty),))
            assert len(steps) <= math.ceil(math.log2(num_rows)) + 2 <= 2 * math.log2(num_rows) + 2


@given(st.integers(1, 40), st.data())
def test_all_guilty_rows_are_found_and_all_others_are_settled_once(num_rows: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, num_rows - 1), min_size=1, max_size=max(1, num_rows - 1)))
    verdict, steps = run(BlameSearch(rows_of(num_rows, num_rows // 2), 10_000), holds_any(guilty))
    assert set(verdict.guilty) == guilty
    assert len(verdict.guilty) == len(guilty)
    assert (verdict.rank_at_fault, verdict.nobody) == (None, False)
    settled = [row.request_id for rows in steps if not holds_any(guilty)(rows) for row in rows]
    assert sorted(settled) == sorted(set(range(num_rows)) - guilty) or num_rows == 1
    for request_id in guilty if num_rows > 1 else ():
        assert (request_id,) in [tuple(row.request_id for row in rows) for rows in steps]


def test_prefill_rows_are_suspected_first() -> None:
    search = BlameSearch(rows_of(8, num_prefill=3), 64)
    rows = search.next_rows()
    assert rows is not None
    assert [row.request_id for row in rows] == [5, 6, 7, 0]


def test_a_failed_step_of_one_row_convicts_it_without_another_step() -> None:
    search = BlameSearch(rows_of(1), 64)
    search.failed(RANK, None)
    assert search.verdict == Verdict(guilty=(RequestId(0),))
    assert search.next_rows() is None


def test_nobody_is_blamed_when_nothing_fails_any_more() -> None:
    verdict, steps = run(BlameSearch(rows_of(8), 64), lambda rows: False)
    assert verdict == Verdict(nobody=True)
    assert sorted(row.request_id for rows in steps for row in rows) == list(range(8))


def test_rows_that_fail_only_together_are_not_blamed() -> None:
    verdict, _ = run(BlameSearch(rows_of(8), 64), lambda rows: len(rows) > 2)
    assert verdict == Verdict(nobody=True)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8])
def test_the_rank_is_at_fault_when_every_row_fails_alone(num_rows: int) -> None:
    verdict, steps = run(BlameSearch(rows_of(num_rows), 64), lambda rows: True)
    assert verdict == Verdict(rank_at_fault=RANK)
    assert sum(len(rows) == 1 for rows in steps) == num_rows


def test_a_row_that_fails_alone_is_not_convicted_before_a_step_without_it_succeeded() -> None:
    search = BlameSearch(rows_of(2), 64)
    search.next_rows()
    search.failed(RANK, None)
    assert search.verdict is None
    search.next_rows()
    search.succeeded()
    assert search.verdict == Verdict(guilty=(RequestId(0),))


def test_slots_named_by_the_first_failure_are_guilty_at_once() -> None:
    search = BlameSearch(rows_of(8), 64)
    search.failed(RANK, (Slot(2), Slot(5)))
    assert search.verdict == Verdict(guilty=(RequestId(2), RequestId(5)))
    assert search.next_rows() is None


def test_slots_named_during_the_search_are_guilty_beside_those_found_before() -> None:
    search = BlameSearch(rows_of(4), 64)
    assert [row.request_id for row in search.next_rows() or ()] == [0, 1]
    search.failed(RANK, None)
    search.next_rows()
    search.failed(RANK, None)  # row 0 failed alone
    assert [row.request_id for row in search.next_rows() or ()] == [2, 3, 1]
    search.failed(RANK, None)
    assert [row.request_id for row in search.next_rows() or ()] == [2, 3]
    search.succeeded()
    search.next_rows()
    search.failed(RANK, (Slot(1),))
    assert search.verdict == Verdict(guilty=(RequestId(0), RequestId(1)))


@pytest.mark.parametrize("named", [None, (), (Slot(77),)])
def test_a_failure_that_names_no_slot_of_the_step_starts_a_search(named: tuple[Slot, ...] | None) -> None:
    search = BlameSearch(rows_of(8), 64)
    search.failed(RANK, named)
    assert search.verdict is None
    assert search.next_rows() is not None


def test_past_the_deadline_the_rank_that_failed_last_is_at_fault() -> None:
    search = BlameSearch(rows_of(64), 3)
    search.failed(1, None)
    for rank in (1, 1, 2):
        assert search.verdict is None
        search.next_rows()
        search.failed(rank, None)
    assert search.verdict == Verdict(rank_at_fault=2)
    assert search.next_rows() is None


def test_the_deadline_keeps_rows_that_were_convicted_before_it() -> None:
    search = BlameSearch(rows_of(8), 6)
    verdict, steps = run(search, holds_any({0, 7, 2}))
    assert len(steps) == 6
    assert verdict.rank_at_fault is None  # some step succeeded: the rank is sound
    assert verdict.guilty
    assert set(verdict.guilty) <= {0, 7, 2}


def test_rows_that_all_fail_alone_on_different_ranks_are_guilty_themselves() -> None:
    search = BlameSearch(rows_of(2), 64)
    search.failed(0, None)
    for rank in (0, 1):
        assert len(search.next_rows() or ()) == 1
        search.failed(rank, None)
    assert search.verdict == Verdict(guilty=(RequestId(0), RequestId(1)))


def test_a_dropped_row_is_not_run_again_and_not_guilty() -> None:
    search = BlameSearch(rows_of(8), 64)
    search.next_rows()
    search.failed(RANK, None)
    search.drop(RequestId(0))
    verdict, steps = run(search, holds_any({0, 5}))
    assert verdict == Verdict(guilty=(RequestId(5),))
    assert all(row.request_id != 0 for rows in steps for row in rows)


def test_a_row_dropped_while_it_runs_does_not_convict_the_row_beside_it() -> None:
    search = BlameSearch(rows_of(4), 64)
    assert [row.request_id for row in search.next_rows() or ()] == [0, 1]
    search.drop(RequestId(0))
    search.failed(RANK, None)
    verdict, _ = run(search, holds_any({0}))
    assert verdict == Verdict(nobody=True)


def test_the_last_row_left_is_convicted_when_it_fails_alone() -> None:
    search = BlameSearch(rows_of(3), 64)
    search.drop(RequestId(1))
    search.drop(RequestId(2))
    verdict, _ = run(search, lambda rows: True)
    assert verdict == Verdict(guilty=(RequestId(0),))


def test_a_row_dropped_after_it_failed_alone_still_speaks_against_the_rank() -> None:
    search = BlameSearch(rows_of(2), 64)
    search.next_rows()
    search.failed(RANK, None)
    search.drop(RequestId(0))
    verdict, _ = run(search, lambda rows: True)
    assert verdict == Verdict(rank_at_fault=RANK)


def test_when_every_row_is_dropped_the_search_ends_without_a_word() -> None:
    search = BlameSearch(rows_of(2), 64)
    search.drop(RequestId(0))
    search.drop(RequestId(1))
    assert search.next_rows() is None
    assert search.verdict == Verdict()


@pytest.mark.parametrize("seed", range(200))
def test_under_random_drops_only_guilty_live_rows_are_convicted(seed: int) -> None:
    rng = random.Random(seed)
    num_rows = rng.randint(2, 32)
    guilty = set(rng.sample(range(num_rows), rng.randint(1, num_rows - 1)))
    search, dropped, innocent_ran = BlameSearch(rows_of(num_rows, num_rows // 2), 10_000), set[int](), False
    while (rows := search.next_rows()) is not None:
        if rng.random() < 0.2:
            dropped.add(gone := rng.randrange(num_rows))
            search.drop(RequestId(gone))
        if holds_any(guilty)(rows):
            search.failed(RANK, None)
        else:
            innocent_ran = True
            search.succeeded()
    assert search.verdict is not None
    assert set(search.verdict.guilty) <= guilty - dropped
    if innocent_ran:
        assert set(search.verdict.guilty) == guilty - dropped
        assert search.verdict.rank_at_fault is None


def test_reports_out_of_turn_are_errors() -> None:
    search = BlameSearch(rows_of(4), 64)
    with pytest.raises(RuntimeError, match="call next_rows first"):
        search.succeeded()
    search.failed(RANK, None)
    with pytest.raises(RuntimeError, match="call next_rows first"):
        search.failed(RANK, None)


@pytest.mark.parametrize(("num_rows", "deadline_steps"), [(0, 5), (4, 0)])
def test_a_search_without_rows_or_steps_is_refused(num_rows: int, deadline_steps: int) -> None:
    with pytest.raises(ValueError, match="at least one of each"):
        BlameSearch(rows_of(num_rows), deadline_steps)
