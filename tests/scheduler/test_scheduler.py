# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/scheduler.py`: one for each rule. `test_scheduler_random.py` tests them all at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.protocol.commands import Logits, MixedStep, Slot
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.plan import Plan, plan_command
from metrale_ray.scheduler.request import RequestId
from metrale_ray.scheduler.row_limit import GOOD_STEPS, UNEXPLAINED_FAILURES
from metrale_ray.scheduler.scheduler import Emission, Scheduler
from tests.scheduler.scheduler_cases import ROOMY, a_request, run_to_end, step, token_at, tokens_for


def a_scheduler(*requests: Any, **changes: Any) -> Scheduler:
    scheduler = Scheduler(dataclasses.replace(ROOMY, **changes))
    for request in requests:
        scheduler.add(request)
    return scheduler


def ids(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [row.request_id for row in plan.rows]


def lengths(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [len(row.span.token_ids) for row in plan.rows]


# The life of a request.


def test_an_idle_scheduler_has_nothing_to_do() -> None:
    assert a_scheduler().next_step() is None


def test_a_request_is_prefilled_then_decoded_then_its_slot_is_freed() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=5, max_tokens=2))
    plan, emissions = step(scheduler)
    (row,) = plan.rows
    assert (row.span.slot, row.span.start, row.span.new_blocks, row.samples) == (0, 0, (0, 1), True)
    assert row.span.token_ids == tuple(token_at(1, position) for position in range(5))
    assert emissions == [Emission(RequestId(1), token_at(1, 5))]
    plan, emissions = step(scheduler)
    assert (plan.rows[0].span.start, plan.rows[0].span.token_ids) == (5, (token_at(1, 5),))
    assert emissions == [Emission(RequestId(1), token_at(1, 6), "length")]
    assert scheduler.next_step() == Plan(frees=(Slot(0),), rows=())
    assert scheduler.next_step() is None
    assert scheduler.num_free_blocks == scheduler.num_total_blocks == 64
    assert scheduler.num_finished == 1


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    stop = token_at(1, 6)
    scheduler = a_scheduler(a_request(1, num_prompt=5, max_tokens=2, stop_token_ids=frozenset({stop})))
    step(scheduler)
    assert step(scheduler)[1] == [Emission(RequestId(1), stop, "stop", stop)]
    assert scheduler.num_running == 0


def test_a_stop_token_in_the_prompt_does_not_end_a_request() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=5, stop_token_ids=frozenset({token_at(1, 2)})))
    assert len(run_to_end(scheduler)[RequestId(1)]) == 4


def test_a_long_prompt_is_prefilled_in_chunks_of_which_only_the_last_samples() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=20), max_num_batched_tokens=8)
    seen = []
    for _ in range(3):
        (row,) = step(scheduler)[0].rows
        seen.append((row.span.start, len(row.span.token_ids), row.span.logits, row.samples, len(row.span.new_blocks)))
    assert seen == [(0, 8, Logits.NONE, False, 2), (8, 8, Logits.NONE, False, 2), (16, 4, Logits.LAST, True, 1)]


def test_all_prompt_logits_are_asked_for_chunk_by_chunk() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=9, prompt_logits_all=True), max_num_batched_tokens=8)
    rows = [step(scheduler)[0].rows[0] for _ in range(3)]
    assert [row.span.logits for row in rows] == [Logits.ALL, Logits.ALL, Logits.LAST]
    assert [len(row.span.token_ids) for row in rows] == [8, 1, 1]
    assert [row.samples for row in rows] == [False, True, True]


# What a step holds.


def test_decode_rows_come_first_and_prompt_chunks_share_what_is_left() -> None:
    scheduler = a_scheduler(a_request(1), max_num_batched_tokens=10)
    step(scheduler)
    for request_id in (2, 3, 4):
        scheduler.add(a_request(request_id, num_prompt=6))
    plan, _ = step(scheduler)
    assert ids(plan) == [1, 2, 3]
    assert lengths(plan) == [1, 6, 3]
    assert [row.samples for row in plan.rows] == [True, True, False]
    assert isinstance(plan_command(plan.rows, ProtocolVersion.V2), MixedStep)
    plan, _ = step(scheduler)
    assert ids(plan) == [1, 2, 3, 4]
    assert lengths(plan) == [1, 1, 3, 5]


def test_without_mixed_steps_decode_rows_and_single_chunks_take_turns() -> None:
    scheduler = a_scheduler(a_request(1), a_request(2), a_request(3, num_prompt=12), mixed_steps=False)
    scheduler.add(a_request(4, max_tokens=1))
    seen = []
    while (plan := scheduler.next_step()) is not None:
        scheduler.apply(plan, tokens_for(plan.rows))
        seen.append(ids(plan))
        assert len(plan.rows) <= 1 or all(row.is_decode for row in plan.rows)
    assert seen[:6] == [[1], [1], [2], [1, 2], [3], [1, 2, 3]]


def test_requests_are_admitted_in_order_and_a_large_one_is_not_passed_by() -> None:
    scheduler = a_scheduler(
        a_request(1, num_prompt=8, max_tokens=9), a_request(2, num_prompt=16, max_tokens=1), a_request(3), num_blocks=5
    )
    plan, _ = step(scheduler)
    assert ids(plan) == [1]
    assert scheduler.num_waiting == 2


def test_the_watermark_is_kept_free_unless_nothing_runs() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=12), a_request(2), a_request(3), num_blocks=8, watermark=0.5)
    plan, _ = step(scheduler)
    assert ids(plan) == [1, 2]  # 3 blocks and 1 of 8; the other 4 stay free
    assert len(plan.rows[0].span.token_ids) + len(plan.rows[1].span.token_ids) == ROOMY.max_num_batched_tokens
    assert ids(step(scheduler)[0]) == [1, 2]
    alone = a_scheduler(a_request(1, num_prompt=16), num_blocks=5, watermark=0.9)
    assert ids(step(alone)[0]) == [1]


def test_the_lowest_free_slot_is_given_and_slots_do_not_move() -> None:
    scheduler = a_scheduler(*(a_request(request_id, max_tokens=8) for request_id in range(4)))
    step(scheduler)
    scheduler.abort(RequestId(2))
    scheduler.abort(RequestId(0))
    scheduler.add(a_request(7))
    plan, _ = step(scheduler)
    assert plan.frees == (2, 0)
    assert {row.request_id: row.span.slot for row in plan.rows} == {1: 1, 3: 3, 7: 0}


def test_a_slot_and_its_blocks_are_used_again_in_the_plan_that_frees_them() -> None:
    scheduler = a_scheduler(
        a_request(1, 8, max_tokens=1), a_request(2, 8, max_tokens=1), max_batch_size=1, num_blocks=2
    )
    assert ids(step(scheduler)[0]) == [1]
    plan, _ = step(scheduler)
    assert (plan.frees, ids(plan)) == ((0,), [2])
    assert set(plan.rows[0].span.new_blocks) == {0, 1}


def test_with_one_slot_every_plan_has_one_row() -> None:
    scheduler = a_scheduler(*(a_request(request_id, 9) for request_id in range(3)), max_batch_size=1)
    while (plan := scheduler.next_step()) is not None:
        assert len(plan.rows) <= 1
        if plan.rows:
            plan_command(plan.rows, ProtocolVersion.V1)
        scheduler.apply(plan, tokens_for(plan.rows))
    assert scheduler.num_finished == 3


# Leaving early.


@pytest.mark.parametrize("leave", ["abort", "finish", "fail"])
def test_a_request_may_leave_while_it_waits(leave: str) -> None:
    scheduler = a_scheduler(a_request(1))
    assert getattr(scheduler, leave)(RequestId(1))
    assert not getattr(scheduler, leave)(RequestId(1))
    assert scheduler.next_step() is None
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    counters = {"abort": scheduler.num_aborted, "finish": scheduler.num_finished, "fail": scheduler.num_failed}
    assert counters.pop(leave) == 1
    assert set(counters.values()) == {0}


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_request_may_leave_during_prefill_and_decode(num_steps: int) -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=20, max_tokens=9))
    for _ in range(num_steps):
        step(scheduler)
    scheduler.abort(RequestId(1))
    assert scheduler.num_free_blocks == scheduler.num_total_blocks
    assert scheduler.next_step() == Plan(frees=(Slot(0),), rows=())


def test_a_request_that_leaves_under_a_step_gets_no_token_and_its_slot_is_freed() -> None:
    scheduler = a_scheduler(a_request(1), a_request(2))
    plan = scheduler.next_step()
    assert plan is not None
    scheduler.abort(RequestId(1))
    emissions = scheduler.apply(plan, tokens_for(plan.rows))
    assert [emission.request_id for emission in emissions] == [2]
    after = scheduler.next_step()
    assert after is not None
    assert (after.frees, ids(after)) == ((0,), [2])


def test_a_token_need_not_be_given_for_a_request_that_left() -> None:
    scheduler = a_scheduler(a_request(1))
    plan = scheduler.next_step()
    assert plan is not None
    scheduler.fail(RequestId(1))
    assert scheduler.apply(plan, {}) == []


def test_a_slot_in_which_nothing_was_settled_is_not_freed_on_the_ranks() -> None:
    scheduler = a_scheduler(a_request(1), a_request(2))
    plan = scheduler.next_step()
    assert plan is not None
    scheduler.step_failed(plan)
    scheduler.fail(RequestId(1))
    after = scheduler.next_step()
    assert after is not None
    assert (after.frees, ids(after)) == ((), [2])
    assert after.rows[0].span.slot == 1


# Failed steps.


def test_after_a_failed_step_the_same_rows_are_planned_again() -> None:
    scheduler = a_scheduler(a_request(1), a_request(2))
    step(scheduler)
    plan = scheduler.next_step()
    assert plan is not None
    assert [row.span.new_blocks for row in plan.rows] == [(2,), (3,)]
    scheduler.step_failed(plan)
    assert scheduler.next_step() == plan


def test_parts_of_a_failed_plan_settle_alone_and_the_rest_is_planned_again() -> None:
    scheduler = a_scheduler(*(a_request(request_id) for request_id in (1, 2, 3)))
    plan = scheduler.next_step()
    assert plan is not None
    scheduler.step_failed(plan)
    part = Plan((), plan.rows[:1])
    assert scheduler.apply(part, tokens_for(part.rows)) == [Emission(RequestId(1), token_at(1, 4))]
    scheduler.step_failed(Plan((), plan.rows[1:]))
    after = scheduler.next_step()
    assert after is not None
    assert [(row.request_id, row.span.start) for row in after.rows] == [(1, 4), (2, 0), (3, 0)]
    assert after.rows[1:] == plan.rows[1:]


def test_a_row_that_was_settled_or_planned_before_is_refused_and_nothing_is_settled() -> None:
    scheduler = a_scheduler(a_request(1), a_request(2))
    first = scheduler.next_step()
    assert first is not None
    scheduler.step_failed(first)
    scheduler.apply(Plan((), first.rows[:1]), tokens_for(first.rows))
    with pytest.raises(ValueError, match="request 1 has no such row in the last plan, or it was settled before"):
        scheduler.apply(first, tokens_for(first.rows))
    second = scheduler.next_step()
    assert second is not None
    assert [row.span.start for row in second.rows] == [4, 0]


def test_a_row_of_an_older_plan_is_refused() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=9), max_num_batched_tokens=8)
    first, _ = step(scheduler)
    second = scheduler.next_step()
    assert second is not None
    with pytest.raises(ValueError, match="request 1 has no such row in the last plan"):
        scheduler.apply(first, {})
    with pytest.raises(ValueError, match="request 1 has no such row in the last plan"):
        scheduler.step_failed(first)
    assert scheduler.apply(second, tokens_for(second.rows)) == [Emission(RequestId(1), token_at(1, 9))]


def test_a_missing_token_is_refused_and_nothing_is_settled() -> None:
    scheduler = a_scheduler(a_request(1), a_request(2))
    plan = scheduler.next_step()
    assert plan is not None
    with pytest.raises(ValueError, match="no token for request 2"):
        scheduler.apply(plan, {RequestId(1): 5})
    assert len(scheduler.apply(plan, tokens_for(plan.rows))) == 2


def test_a_second_plan_before_the_first_is_settled_is_refused() -> None:
    scheduler = a_scheduler(a_request(1))
    scheduler.next_step()
    with pytest.raises(RuntimeError, match="a plan is under way"):
        scheduler.next_step()


def test_a_requeued_request_starts_over_in_front_of_the_queue_and_repeats_no_token() -> None:
    scheduler = a_scheduler(a_request(1, max_tokens=5), a_request(2, max_tokens=5), max_batch_size=2)
    step(scheduler)
    _, emissions = step(scheduler)
    scheduler.add(a_request(3))
    assert scheduler.requeue(RequestId(1))
    assert not scheduler.requeue(RequestId(1))
    plan = scheduler.next_step()
    assert plan is not None
    assert plan.frees == (0,)
    row = plan.rows[-1]
    assert (row.request_id, row.span.slot, row.span.start) == (1, 0, 0)
    assert row.span.token_ids == tuple(token_at(1, position) for position in range(6))
    emissions = scheduler.apply(plan, tokens_for(plan.rows))
    assert Emission(RequestId(1), token_at(1, 6)) in emissions
    assert scheduler.num_preemptions == 0


def test_a_request_requeued_under_a_step_gets_nothing_from_it() -> None:
    scheduler = a_scheduler(a_request(1), a_request(2))
    step(scheduler)
    plan = scheduler.next_step()
    assert plan is not None
    scheduler.step_failed(plan)
    scheduler.requeue(RequestId(1))
    assert [emission.request_id for emission in scheduler.apply(plan, tokens_for(plan.rows))] == [2]


def fail_unexplained(scheduler: Scheduler) -> None:
    """As often as it takes to have the row limit halved once."""
    for _ in range(UNEXPLAINED_FAILURES):
        scheduler.failure_unexplained()


def test_the_row_limit_rises_again_after_many_good_steps_and_a_failed_one_begins_the_count_anew() -> None:
    scheduler = a_scheduler(a_request(1, max_tokens=600), max_model_len=1_000, num_blocks=300)
    fail_unexplained(scheduler)
    assert scheduler.row_limit == 2
    for _ in range(GOOD_STEPS - 1):
        step(scheduler)
    plan = scheduler.next_step()
    assert plan is not None
    scheduler.step_failed(plan)
    for _ in range(GOOD_STEPS - 1):
        step(scheduler)
    assert scheduler.row_limit == 2
    step(scheduler)
    assert scheduler.row_limit == 4


def test_the_row_limit_is_halved_down_to_one_and_rows_then_take_turns() -> None:
    scheduler = a_scheduler(*(a_request(request_id, max_tokens=20) for request_id in range(4)))
    scheduler.add(a_request(9))
    step(scheduler)
    assert scheduler.row_limit == 4
    fail_unexplained(scheduler)
    assert scheduler.row_limit == 2
    assert [ids(step(scheduler)[0]) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    fail_unexplained(scheduler)
    fail_unexplained(scheduler)
    assert scheduler.row_limit == 1
    turns = [ids(step(scheduler)[0]) for _ in range(8)]
    assert all(len(turn) == 1 for turn in turns)
    assert {turn[0] for turn in turns} == {0, 1, 2, 3}
    assert scheduler.num_waiting == 1  # nothing is admitted while more run than have a row
    run_to_end(scheduler)
    assert scheduler.num_finished == 5


def test_without_mixed_steps_too_nothing_is_admitted_past_the_row_limit() -> None:
    scheduler = a_scheduler(*(a_request(request_id, max_tokens=9) for request_id in range(3)), mixed_steps=False)
    for _ in range(5):
        step(scheduler)
    assert scheduler.num_running == 3
    fail_unexplained(scheduler)
    scheduler.add(a_request(9))
    for _ in range(4):
        assert len(step(scheduler)[0].rows) == 2
    assert scheduler.num_waiting == 1
    run_to_end(scheduler)
    assert scheduler.num_finished == 4


# Preemption. Two tokens of prompt in blocks of two: each sequence needs a block at once, and one more every two tokens.


def tight(num_blocks: int, **changes: Any) -> SchedulerLimits:
    return dataclasses.replace(ROOMY, block_size=2, num_blocks=num_blocks, **changes)


def preempted_in(scheduler: Scheduler, max_steps: int = 30) -> list[int]:
    """Run until a preemption; the requests that have lost their slot."""
    for _ in range(max_steps):
        before, num_preemptions = set(running_ids(scheduler)), scheduler.num_preemptions
        plan = scheduler.next_step()
        assert plan is not None
        lost = sorted(before - set(running_ids(scheduler)))
        scheduler.apply(plan, tokens_for(plan.rows))
        if scheduler.num_preemptions > num_preemptions:
            return lost
    raise AssertionError("nothing was preempted")


def running_ids(scheduler: Scheduler) -> list[int]:
    return list(scheduler._running)


def test_among_equals_the_newest_is_preempted_and_the_oldest_never() -> None:
    scheduler = Scheduler(tight(5))
    for request_id in (1, 2, 3):
        scheduler.add(a_request(request_id, 2, max_tokens=8))
    assert preempted_in(scheduler) == [3]
    while scheduler.num_running + scheduler.num_waiting == 3:
        oldest = min(running_ids(scheduler))
        step(scheduler)
        assert oldest in running_ids(scheduler) or scheduler.num_finished


def test_a_preempted_sequence_goes_in_front_of_the_queue_and_repeats_no_token() -> None:
    scheduler = Scheduler(tight(6, max_batch_size=2))
    for request_id in (1, 2, 3):
        scheduler.add(a_request(request_id, 2, max_tokens=8))
    assert preempted_in(scheduler) == [2]
    emitted = run_to_end(scheduler)
    assert scheduler.num_preemptions >= 1
    assert emitted[RequestId(2)][-1] == token_at(2, 9)
    assert emitted[RequestId(3)] == [token_at(3, position) for position in range(2, 10)]


def test_the_slot_of_a_preempted_sequence_is_freed_in_the_plan_that_uses_its_blocks() -> None:
    scheduler = Scheduler(tight(4))
    for request_id in (1, 2):
        scheduler.add(a_request(request_id, 2, max_tokens=6))
    while scheduler.num_preemptions == 0:
        plan, _ = step(scheduler)
    assert plan.frees == (1,)
    assert ids(plan) == [1]
    assert len(plan.rows[0].span.new_blocks) == 1


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = Scheduler(tight(10))
    for request_id, num_prompt in enumerate((3, 3, 1, 9)):
        scheduler.add(a_request(request_id, num_prompt))
    step(scheduler)
    step(scheduler)
    for request_id in (1, 3):  # as if resumed just now, so that 2 goes first, and then 3, the newest
        scheduler._running[RequestId(request_id)].num_generated_at_resume = 2
    plan, _ = step(scheduler)
    assert (plan.frees, ids(plan)) == ((2, 3), [0, 1])
    assert scheduler.num_free_blocks == 4  # 2 would need two of them
    assert ids(step(scheduler)[0]) == [0, 1, 2]


def test_all_prompt_logits_are_given_once_each_when_a_prefill_starts_over() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=20, prompt_logits_all=True), max_num_batched_tokens=8)
    seen = [step(scheduler)[0].rows[0]]
    scheduler.requeue(RequestId(1))
    seen += [step(scheduler)[0].rows[0] for _ in range(4)]
    asked = [(row.span.start, row.span.end) for row in seen if row.span.logits is Logits.ALL]
    assert asked == [(0, 8), (8, 16), (16, 20)]


def test_chunks_that_want_all_logits_share_the_steps_room_for_them_and_others_do_not_wait() -> None:
    scheduler = a_scheduler(max_num_batched_tokens=64, max_prompt_logits=6)
    for request_id, wants_all in ((1, True), (2, True), (3, False)):
        scheduler.add(a_request(request_id, num_prompt=8, prompt_logits_all=wants_all))
    plan, _ = step(scheduler)
    assert (ids(plan), lengths(plan)) == ([1, 3], [6, 8])  # 2 has its slot, and no room
    plan, _ = step(scheduler)
    assert (ids(plan), lengths(plan)) == ([3, 1, 2], [1, 2, 4])
    plan, _ = step(scheduler)
    assert (ids(plan), lengths(plan)) == ([1, 3, 2], [1, 1, 4])


# Priorities.


def test_the_lower_priority_number_is_admitted_first_and_arrival_decides_among_equals() -> None:
    scheduler = a_scheduler(max_batch_size=1)
    for request_id, priority in ((1, 5), (2, 0), (3, -7), (4, 0), (5, 5)):
        scheduler.add(a_request(request_id, max_tokens=1, priority=priority))
    assert list(run_to_end(scheduler)) == [3, 2, 4, 1, 5]


def test_a_prompt_of_a_higher_priority_goes_before_one_that_is_half_computed() -> None:
    scheduler = a_scheduler(a_request(1, num_prompt=40), max_num_batched_tokens=8)
    step(scheduler)
    scheduler.add(a_request(2, num_prompt=10, priority=-1))
    plans = [step(scheduler)[0] for _ in range(3)]
    assert [(ids(plan), lengths(plan)) for plan in plans] == [([2], [8]), ([2, 1], [2, 6]), ([2, 1], [1, 7])]


def test_one_that_waits_never_takes_the_slot_of_one_that_runs() -> None:
    scheduler = a_scheduler(a_request(1, max_tokens=9, priority=9), max_batch_size=1)
    step(scheduler)
    scheduler.add(a_request(2, priority=-9))
    while scheduler.num_finished == 0:
        assert ids(step(scheduler)[0]) == [1]
    assert ids(step(scheduler)[0]) == [2]


def test_the_lowest_priority_is_preempted_first_although_it_came_first() -> None:
    scheduler = Scheduler(tight(5))
    for request_id, priority in ((1, 3), (2, 0), (3, 0)):
        scheduler.add(a_request(request_id, 2, max_tokens=8, priority=priority))
    assert preempted_in(scheduler) == [1]
    emitted = run_to_end(scheduler)
    assert emitted[RequestId(1)][-1] == token_at(1, 9)
    assert scheduler.num_finished == 3


def test_requests_that_come_together_are_taken_whole_or_refused_whole() -> None:
    scheduler = a_scheduler(a_request(1), max_queue_len=3)
    with pytest.raises(RequestError, match="1 requests wait and 3 more would and the queue holds 3") as caught:
        scheduler.add(*(a_request(request_id) for request_id in (2, 3, 4)))
    assert (caught.value.code, scheduler.num_waiting) == ("queue_full", 1)
    with pytest.raises(RequestError, match="n is 4; at most 3 sequences find room") as caught:
        scheduler.add(*(a_request(request_id) for request_id in (2, 3, 4, 5)))
    assert (caught.value.code, caught.value.param, scheduler.num_waiting) == ("invalid_request", "n", 1)
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(a_request(2), a_request(2))
    scheduler.add(a_request(2), a_request(3))
    assert list(run_to_end(scheduler)) == [1, 2, 3]


def test_requests_that_must_preempt_one_another_get_the_same_tokens_as_alone() -> None:
    scheduler = a_scheduler(num_blocks=96, max_batch_size=8, max_model_len=512)
    requests = [a_request(request_id, 3, max_tokens=300) for request_id in range(8)]
    for request in requests:
        scheduler.add(request)
    together = run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    for request in requests:
        alone = a_scheduler(request, num_blocks=96, max_model_len=512)
        assert together[request.request_id] == run_to_end(alone)[request.request_id]
