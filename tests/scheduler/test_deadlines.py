# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/deadlines.py`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.scheduler.deadlines import Deadlines
from metrale_ray.scheduler.request import RequestId


def test_a_request_is_late_from_its_deadline_on_and_told_of_once() -> None:
    deadlines = Deadlines()
    deadlines.add(RequestId(1), 5.0)
    deadlines.add(RequestId(2), 3.0)
    assert deadlines.take_late(2.9) == []
    assert deadlines.take_late(5.0) == [2, 1]
    assert deadlines.take_late(9.0) == []
    assert len(deadlines) == 0


def test_a_request_that_has_ended_is_never_late() -> None:
    deadlines = Deadlines()
    deadlines.add(RequestId(1), 5.0)
    deadlines.drop(RequestId(1))
    deadlines.drop(RequestId(2))  # it had none
    assert deadlines.take_late(9.0) == []


def test_what_has_ended_long_before_its_deadline_takes_no_room() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(RequestId(number), 1e6 + number)
        if number >= 10:
            deadlines.drop(RequestId(number))
    assert len(deadlines) == 10
    assert len(deadlines._heap) < 200
    assert deadlines.take_late(2e6) == list(range(10))


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60))
def test_it_agrees_with_a_plain_table(history: list[tuple[int, bool]]) -> None:
    deadlines, table = Deadlines(), dict[RequestId, float]()
    for number, (at_s, drops) in enumerate(history):
        deadlines.add(RequestId(number), at_s)
        table[RequestId(number)] = at_s
        if drops and number % 3:
            deadlines.drop(RequestId(number - 1))
            table.pop(RequestId(number - 1), None)
        late = sorted(request_id for request_id, due_s in table.items() if due_s <= number)
        assert sorted(deadlines.take_late(number)) == late
        for request_id in late:
            del table[request_id]
        assert len(deadlines) == len(table)
