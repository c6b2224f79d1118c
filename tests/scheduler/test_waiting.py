# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/waiting.py`."""

from __future__ import annotations

import pytest

from metrale_ray.scheduler.request import Sequence
from metrale_ray.scheduler.waiting import WaitingQueue
from tests.scheduler.scheduler_cases import a_request


def a_sequence(arrival: int) -> Sequence:
    return Sequence(a_request(arrival), arrival, 8, [])


def drained(queue: WaitingQueue) -> list[int]:
    arrivals = []
    while (sequence := queue.first()) is not None:
        arrivals.append(sequence.arrival)
        queue.remove(sequence)
    return arrivals


def test_new_sequences_are_served_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    for arrival in range(4):
        queue.add(a_sequence(arrival))
    assert len(queue) == 4
    assert drained(queue) == [0, 1, 2, 3]
    assert len(queue) == 0


def test_those_that_ran_before_come_first_in_order_of_arrival() -> None:
    queue = WaitingQueue()
    for arrival in (5, 6):
        queue.add(a_sequence(arrival))
    for arrival in (2, 0, 3):
        queue.put_back(a_sequence(arrival))
    assert drained(queue) == [0, 2, 3, 5, 6]


def test_a_sequence_leaves_from_the_middle() -> None:
    queue = WaitingQueue()
    fresh, returned = [a_sequence(arrival) for arrival in (7, 8, 9)], [a_sequence(arrival) for arrival in (1, 2, 3)]
    for sequence in fresh:
        queue.add(sequence)
    for sequence in returned:
        queue.put_back(sequence)
    queue.remove(fresh[1])
    queue.remove(returned[1])
    assert drained(queue) == [1, 3, 7, 9]


def test_taking_out_a_sequence_that_is_not_in_the_queue_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in list"):
        WaitingQueue().remove(a_sequence(1))
