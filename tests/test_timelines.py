# SPDX-License-Identifier: MIT OR Apache-2.0
"""How long sequences queue, prefill and decode: each moment is counted once, and nothing stays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.scheduler.request import FinishReason, RequestId
from metrale_ray.timelines import Timelines

A, B = RequestId(1), RequestId(2)


def sums(timelines: Timelines) -> dict[str, tuple[int, float]]:
    """The number of values and their sum, by histogram."""
    document: dict[str, Any] = timelines.document()
    return {name: (sum(each["counts"]), each["sum_s"]) for name, each in document.items()}


def test_a_sequence_queues_prefills_and_decodes() -> None:
    timelines = Timelines()
    timelines.arrived([A], 7, 10.0)
    timelines.begin([A], 11.0)
    timelines.sampled([A], 14.0)
    timelines.sampled([A], 15.0)
    timelines.ended(A, "length", 20.0)
    expected = {"queue": (1, 1.0), "prefill": (1, 3.0), "decode": (1, 6.0), "end_to_end": (1, 10.0)}
    assert sums(timelines) == expected
    assert timelines.num_prompt_tokens == 7
    assert timelines.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert len(timelines) == 0


def test_a_preempted_sequence_that_starts_over_has_queued_and_prefilled_once() -> None:
    timelines = Timelines()
    timelines.arrived([A], 7, 0.0)
    timelines.begin([A], 1.0)
    timelines.begin([A], 2.0)  # preempted before its first token
    timelines.sampled([A], 4.0)
    timelines.begin([A], 5.0)  # and after it
    timelines.sampled([A], 6.0)
    timelines.ended(A, "stop", 8.0)
    assert sums(timelines) == {"queue": (1, 1.0), "prefill": (1, 3.0), "decode": (1, 4.0), "end_to_end": (1, 8.0)}
    assert timelines.num_prompt_tokens == 7


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_does_not_end_by_itself_has_no_length(reason: FinishReason) -> None:
    timelines = Timelines()
    timelines.arrived([A, B], 7, 0.0)
    timelines.begin([A], 1.0)
    timelines.ended(A, reason, 2.0)
    timelines.ended(A, reason, 2.0)  # a second time is none
    timelines.ended(B, reason, 2.0)
    timelines.sampled([A, B], 3.0)  # a step that was under way
    assert sums(timelines) == {"queue": (1, 1.0), "prefill": (0, 0.0), "decode": (0, 0.0), "end_to_end": (0, 0.0)}
    assert timelines.finished[reason] == 2
    assert (timelines.num_prompt_tokens, len(timelines), len(timelines._prefilling)) == (0, 0, 0)


def test_one_that_the_engine_never_heard_of_is_counted_too() -> None:
    timelines = Timelines()
    timelines.never_began("abort")
    assert timelines.finished["abort"] == 1


@given(st.lists(st.tuples(st.sampled_from("bse"), st.integers(0, 3), st.sampled_from(["stop", "abort"])), max_size=40))
def test_whatever_comes_in_whatever_order_each_sequence_is_counted_once(moves: list[tuple[str, int, Any]]) -> None:
    timelines = Timelines()
    timelines.arrived([RequestId(n) for n in range(4)], 1, 0.0)
    for now, (move, number, reason) in enumerate(moves):
        if move == "b":
            timelines.begin([RequestId(number)], float(now))
        elif move == "s":
            timelines.sampled([RequestId(number)], float(now))
        else:
            timelines.ended(RequestId(number), reason, float(now))
    for number in range(4):
        timelines.ended(RequestId(number), "abort", 99.0)
    told = sums(timelines)
    assert sum(timelines.finished.values()) == 4
    assert 4 >= told["queue"][0] >= told["prefill"][0] >= told["decode"][0] == told["end_to_end"][0]
    assert timelines.num_prompt_tokens == told["prefill"][0]
    assert (len(timelines), len(timelines._prefilling)) == (0, 0)
