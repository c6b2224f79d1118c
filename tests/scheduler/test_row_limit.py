# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/row_limit.py`."""

from __future__ import annotations

from metrale_ray.scheduler.row_limit import GOOD_STEPS, UNEXPLAINED_FAILURES, RowLimit


def halved(limit: RowLimit) -> int:
    for _ in range(UNEXPLAINED_FAILURES):
        limit.failed()
        limit.unexplained()
    return limit.rows


def good(limit: RowLimit, num_steps: int) -> int:
    for _ in range(num_steps):
        limit.succeeded()
    return limit.rows


def test_unexplained_failures_halve_the_limit_down_to_one() -> None:
    limit = RowLimit(7)
    limit.unexplained()
    assert limit.rows == 7
    limit.unexplained()
    assert limit.rows == 3
    assert [halved(limit) for _ in range(3)] == [1, 1, 1]


def test_good_steps_double_it_again_up_to_where_it_began() -> None:
    limit = RowLimit(7)
    assert [halved(limit), halved(limit)] == [3, 1]
    assert good(limit, GOOD_STEPS - 1) == 1
    assert good(limit, 1) == 2
    assert [good(limit, GOOD_STEPS) for _ in range(3)] == [4, 7, 7]


def test_a_failure_of_any_kind_begins_the_count_of_good_steps_anew() -> None:
    limit = RowLimit(8)
    halved(limit)
    good(limit, GOOD_STEPS - 1)
    limit.failed()
    assert good(limit, GOOD_STEPS - 1) == 4
    assert good(limit, 1) == 8


def test_an_unexplained_failure_is_forgotten_after_many_good_steps() -> None:
    limit = RowLimit(8)
    for _ in range(5):
        limit.failed()
        limit.unexplained()
        assert good(limit, GOOD_STEPS) == 8
