# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/waiting.py`."""

from __future__ import annotations

import pytest

from metrale_ray.scheduler.request import Request, RequestId, Sequence
from metrale_ray.scheduler.waiting import WaitingQueue
from tests.scheduler.scheduler_cases import a_request


def a_sequence(arrival: int, priority: int = 0) -> Sequence:
    return Sequence(a_request(arrival, priority=priority), arrival, 8, [])


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


def test_those_that_come_back_stand_where_they_arrived() -> None:
    queue = WaitingQueue()
    for arrival in (5, 6, 2, 0, 3):
        queue.add(a_sequence(arrival))
    assert drained(queue) == [0, 2, 3, 5, 6]


def test_a_lower_priority_number_comes_first_whenever_it_arrived() -> None:
    queue = WaitingQueue()
    for arrival, priority in enumerate((0, 2**31 - 1, -1, 0, -(2**31), -1)):
        queue.add(a_sequence(arrival, priority))
    assert drained(queue) == [4, 2, 5, 0, 3, 1]


def test_a_sequence_leaves_from_the_middle() -> None:
    queue = WaitingQueue()
    sequences = [a_sequence(arrival) for arrival in (7, 8, 9, 1, 2, 3)]
    for sequence in sequences:
        queue.add(sequence)
    queue.remove(sequences[1])
    queue.remove(sequences[4])
    assert drained(queue) == [1, 3, 7, 9]


def test_taking_out_a_sequence_that_is_not_in_the_queue_is_an_error() -> None:
    queue = WaitingQueue()
    with pytest.raises(ValueError, match="request 1 does not wait"):
        queue.remove(a_sequence(1))
    queue.add(a_sequence(1))
    with pytest.raises(ValueError, match="request 1 does not wait"):
        queue.remove(a_sequence(1))  # another one in the same place
    assert len(queue) == 1


def test_prompt_tokens_are_counted_once_for_all_that_share_them() -> None:
    queue = WaitingQueue()
    one, two = ((1, 2, 3), (4, 5))
    sequences = [Sequence(Request(RequestId(n), prompt, 8), n, 8, prompt) for n, prompt in enumerate((one, one, two))]
    counts = []
    for sequence in sequences:
        queue.add(sequence)
        counts.append(queue.num_prompt_tokens)
    for sequence in sequences:
        queue.remove(sequence)
        counts.append(queue.num_prompt_tokens)
    assert counts == [3, 3, 5, 5, 2, 0]
