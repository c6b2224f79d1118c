# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/admission.py`: every refusal, at its edge."""

from __future__ import annotations

import dataclasses

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.request import Request, RequestId
from metrale_ray.scheduler.scheduler import Scheduler
from tests.scheduler.scheduler_cases import ROOMY, a_request, run_to_end


def refusal(limits: SchedulerLimits, *requests: Request) -> RequestError:
    """The refusal of the last request, after which nothing has changed."""
    scheduler = Scheduler(limits)
    for request in requests[:-1]:
        scheduler.add(request)
    with pytest.raises(RequestError) as caught:
        scheduler.add(requests[-1])
    assert scheduler.num_waiting == len(requests) - 1
    return caught.value


def test_an_empty_prompt_is_refused() -> None:
    error = refusal(ROOMY, Request(RequestId(1), (), 4))
    assert (error.code, error.param) == ("empty_prompt", "prompt")


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_fewer_than_one_token_is_refused(max_tokens: int) -> None:
    error = refusal(ROOMY, a_request(1, max_tokens=max_tokens))
    assert (error.code, error.param) == ("invalid_max_tokens", "max_tokens")
    assert str(max_tokens) in error.message


def test_a_prompt_that_leaves_no_place_for_an_answer_is_refused() -> None:
    error = refusal(ROOMY, a_request(1, num_prompt=64))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "64 tokens; at most 63 are allowed" in error.message
    Scheduler(ROOMY).add(a_request(1, num_prompt=63))


def test_max_tokens_is_lowered_to_what_the_models_length_leaves() -> None:
    scheduler = Scheduler(ROOMY)
    scheduler.add(a_request(1, num_prompt=60, max_tokens=1_000))
    assert len(run_to_end(scheduler)[RequestId(1)]) == 4


def test_a_request_that_does_not_fit_alone_is_refused_and_one_that_just_fits_is_served() -> None:
    limits = dataclasses.replace(ROOMY, num_blocks=3)  # 12 places
    error = refusal(limits, a_request(1, num_prompt=8, max_tokens=6))
    assert (error.code, error.param) == ("kv_cache_exceeded", "max_tokens")
    assert "need 13 places in the KV cache; it has 12" in error.message
    scheduler = Scheduler(limits)
    scheduler.add(a_request(1, num_prompt=8, max_tokens=5))
    assert len(run_to_end(scheduler)[RequestId(1)]) == 5


def test_a_full_queue_refuses_and_a_free_place_accepts_again() -> None:
    limits = dataclasses.replace(ROOMY, max_queue_len=2)
    error = refusal(limits, a_request(1), a_request(2), a_request(3))
    assert (error.code, error.param) == ("queue_full", None)
    scheduler = Scheduler(limits)
    scheduler.add(a_request(1))
    scheduler.add(a_request(2))
    scheduler.abort(RequestId(1))
    scheduler.add(a_request(3))
    assert scheduler.num_waiting == 2


def test_an_id_in_use_is_refused_and_may_be_used_again_later() -> None:
    assert refusal(ROOMY, a_request(1), a_request(1)).code == "duplicate_request_id"
    scheduler = Scheduler(ROOMY)
    scheduler.add(a_request(1))
    run_to_end(scheduler)
    scheduler.add(a_request(1))


def test_a_request_without_a_limit_of_its_own_ends_where_the_model_or_the_cache_does() -> None:
    for num_blocks, length in ((64, 64), (3, 13)):  # 12 places, and the last token needs none
        scheduler = Scheduler(dataclasses.replace(ROOMY, num_blocks=num_blocks))
        scheduler.add(Request(RequestId(1), (1, 2, 3), None))
        emitted = []
        while (plan := scheduler.next_step()) is not None:
            emitted += scheduler.apply(plan, {RequestId(1): 7})
        assert len(emitted) == length - 3
        assert emitted[-1].finish_reason == "length"


def test_a_prompt_that_the_cache_cannot_hold_is_refused_without_a_word_of_max_tokens() -> None:
    limits = dataclasses.replace(ROOMY, num_blocks=3)
    error = refusal(limits, Request(RequestId(1), (1,) * 13, None))
    assert (error.code, error.param) == ("kv_cache_exceeded", "prompt")
    assert "13 tokens, and the KV cache has 12 places. Shorten the prompt" in error.message
    scheduler = Scheduler(limits)
    scheduler.add(Request(RequestId(1), (1,) * 12, None))
    plan = scheduler.next_step()
    assert plan is not None
    assert [e.finish_reason for e in scheduler.apply(plan, {RequestId(1): 7})] == ["length"]


def test_prompt_tokens_that_wait_are_bounded_and_sequences_of_one_prompt_count_once() -> None:
    limits = dataclasses.replace(ROOMY, max_waiting_prompt_tokens=100)
    scheduler, prompt = Scheduler(limits), (1,) * 60
    scheduler.add(*(Request(RequestId(n), prompt, 1) for n in range(3)))
    with pytest.raises(RequestError, match="60 prompt tokens wait and 41 more would; at most 100 may wait") as caught:
        scheduler.add(Request(RequestId(3), (1,) * 41, 1))
    assert caught.value.code == "queue_full"
    scheduler.add(Request(RequestId(3), (1,) * 40, 1))
    for request_id in range(3):
        scheduler.abort(RequestId(request_id))
    scheduler.add(Request(RequestId(4), (2,) * 60, 1))
    run_to_end(scheduler)
    scheduler.add(Request(RequestId(5), (1,) * 63, 1))
