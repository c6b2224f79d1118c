# SPDX-License-Identifier: MIT OR Apache-2.0
"""Thousands of random steps, with every invariant checked after each.

A step may succeed, fail, or fail and be run again in parts; requests are aborted, finished, failed and requeued at any
moment. The ranks are a mirror written from the protocol, the model is a function of request and position, so a token
that is emitted twice, skipped or computed from a wrong prefix shows at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.protocol.commands import Logits
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.plan import Plan, PlanRow, plan_command
from metrale_ray.scheduler.request import Request, RequestId, Sequence
from metrale_ray.scheduler.scheduler import Emission, Scheduler
from tests.scheduler.scheduler_cases import RankMirror, a_request, token_at, tokens_for

BASE = SchedulerLimits(
    max_batch_size=4,
    max_model_len=40,
    max_num_batched_tokens=12,
    num_blocks=24,
    block_size=4,
    watermark=0.05,
    max_queue_len=6,
    resume_protection_tokens=3,
    max_prompt_logits=7,
)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 100},
    "tight": {},
    "tiny cache": {"num_blocks": 10, "max_batch_size": 8},
    "one token blocks": {"num_blocks": 45, "block_size": 1, "max_batch_size": 8},
    "high watermark": {"watermark": 0.6},
    "long protection": {"num_blocks": 10, "max_batch_size": 8, "resume_protection_tokens": 64},
    "small budget": {"max_num_batched_tokens": 3, "max_batch_size": 8},
    "one token a step": {"max_num_batched_tokens": 1},
    "v1": {"max_batch_size": 1},
    "v1, whole cache": {"max_batch_size": 1, "num_blocks": 10, "max_num_batched_tokens": 5},
    "two slots": {"max_batch_size": 2, "num_blocks": 11},
    "eight slots": {"max_batch_size": 8, "max_num_batched_tokens": 32},
    "few prompt logits": {"max_prompt_logits": 2, "max_batch_size": 8},
    "unmixed": {"mixed_steps": False},
    "unmixed tiny cache": {"mixed_steps": False, "num_blocks": 10, "max_batch_size": 8},
}
NUM_STEPS = 700


class Simulation:
    """A scheduler, its ranks, and what each request has been told."""

    def __init__(self, limits: SchedulerLimits, seed: int) -> None:
        self.rng = random.Random(seed)
        self.limits = limits
        self.version = ProtocolVersion.V1 if limits.max_batch_size == 1 else ProtocolVersion.V2
        self.scheduler = Scheduler(limits)
        self.ranks = RankMirror(limits)
        self.live: dict[RequestId, Request] = {}
        self.told: dict[RequestId, list[int]] = {}
        self.logits: dict[RequestId, list[int]] = {}
        self.answers: dict[RequestId, str] = {}
        self.may_fail = True
        self.num_failed_steps = self.num_parts = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.arrive()
            self.leave(0.05)
            self.step()
            self.check()
        self.drain()

    def drain(self) -> None:
        """Nothing arrives, leaves or fails any more: all that is live comes to its end, and nothing is left over."""
        self.may_fail = False
        # Each step of the oldest is one token or a chunk, every one of the others may have a turn in between.
        max_steps = 2 * len(self.live) * self.limits.max_model_len * (self.limits.max_batch_size + 1) + 2
        for _ in range(max_steps):
            if not self.step():
                break
            self.check()
        scheduler = self.scheduler
        assert not self.live
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert scheduler.num_free_blocks == scheduler.num_total_blocks
        assert not self.ranks.lengths
        assert sorted(scheduler._slots._free) == list(range(self.limits.max_batch_size))

    def arrive(self) -> None:
        if self.rng.random() > 0.3:
            return
        first_id = len(self.answers) + len(self.live)
        num_prompt = self.rng.choice([1, 2, 4, 5, 8, 13, 30, 39, 40])
        max_tokens = self.rng.choice([1, 2, 7, 20, 100])
        last = min(num_prompt + max_tokens, self.limits.max_model_len)
        priority, has_stop = self.rng.choice([0, 0, 0, 1, -1, -(2**31)]), self.rng.random() < 0.3
        requests = []
        for request_id in range(first_id, first_id + self.rng.choice([1, 1, 1, 3])):
            stops = {token_at(request_id, self.rng.randrange(last + 1))} if has_stop else set()
            all_logits = request_id == first_id and self.rng.random() < 0.3
            fields = {"stop_token_ids": frozenset(stops), "prompt_logits_all": all_logits, "priority": priority}
            requests.append(a_request(request_id, num_prompt, max_tokens, **fields))
        num_waiting = self.scheduler.num_waiting
        code = None
        try:
            self.scheduler.add(*requests)
        except RequestError as error:
            code = error.code
        for request in requests:
            self.told[request.request_id], self.logits[request.request_id] = [], []
            if code is None:
                self.live[request.request_id] = request
            else:
                self.answer(request.request_id, code)
        too_long = num_prompt >= self.limits.max_model_len
        too_large = not too_long and last - 1 > self.limits.num_blocks * self.limits.block_size
        is_full = num_waiting + len(requests) > self.limits.max_queue_len
        assert (code is None) is not (too_long or too_large or is_full)
        assert self.scheduler.num_waiting == num_waiting + (len(requests) if code is None else 0)

    def leave(self, chance: float) -> None:
        if not self.may_fail or not self.live or self.rng.random() > chance:
            return
        request_id = self.rng.choice(list(self.live))
        scheduler = self.scheduler
        ways: list[tuple[str, Callable[[RequestId], bool]]] = [
            ("abort", scheduler.abort),
            ("finish", scheduler.finish),
            ("fail", scheduler.fail),
        ]
        name, way = self.rng.choice([*ways, ("requeue", scheduler.requeue), ("requeue", scheduler.requeue)])
        has_slot = request_id in scheduler._running
        assert way(request_id) is (has_slot or name != "requeue")
        if name != "requeue":
            del self.live[request_id]
            self.answer(request_id, name)
            assert not way(request_id)

    def answer(self, request_id: RequestId, how: str) -> None:
        assert request_id not in self.answers, "a request is answered twice"
        self.answers[request_id] = how

    def step(self) -> bool:
        scheduler = self.scheduler
        running = list(scheduler._running.values())
        first = min(running, key=lambda sequence: sequence.order, default=None)
        plan = scheduler.next_step()
        assert first is None or first.slot is not None, "the first in order of those that ran was preempted"
        self.check_order(running)
        if plan is None:
            assert not self.live, "there is something to do"
            return False
        for slot in plan.frees:
            self.ranks.free(slot)
        self.check_plan(plan)
        if plan.rows:
            self.run_plan(plan)
        return True

    def check_order(self, ran: list[Sequence]) -> None:
        """Nothing overtook what still waits, and nothing was preempted that is above one that goes on."""
        scheduler = self.scheduler
        admitted = [sequence for sequence in scheduler._running.values() if sequence not in ran]
        waiting = scheduler._waiting.first()
        assert waiting is None or all(sequence.order < waiting.order for sequence in admitted)
        lost = [sequence.request.priority for sequence in ran if sequence.slot is None]
        kept = [sequence for sequence in ran if sequence.slot is not None]
        kept.sort(key=lambda sequence: sequence.order)
        assert not lost or all(sequence.request.priority <= min(lost) for sequence in kept)
        assert not lost or not admitted

    def run_plan(self, plan: Plan) -> None:
        self.leave(0.05)
        if not self.may_fail or self.rng.random() > 0.15:
            self.settle(plan)
            return
        self.num_failed_steps += 1
        self.scheduler.step_failed(plan)
        if self.rng.random() < 0.04:
            self.scheduler.failure_unexplained()
            assert self.scheduler.row_limit >= 1
        rows = list(plan.rows)
        self.rng.shuffle(rows)
        while rows and self.rng.random() < 0.8:
            part, rows = self.split(rows)
            self.leave(0.1)
            self.run_part(Plan((), tuple(part)))

    def split(self, rows: list[PlanRow]) -> tuple[list[PlanRow], list[PlanRow]]:
        size = self.rng.randint(1, len(rows))
        return rows[:size], rows[size:]

    def run_part(self, part: Plan) -> None:
        self.num_parts += 1
        if self.rng.random() < 0.7:
            self.ranks.check(part.rows)
            self.settle(part)
        else:
            self.scheduler.step_failed(part)

    def settle(self, plan: Plan) -> None:
        self.ranks.settle(plan.rows)
        waiting = {sequence.request_id for sequence in self.scheduler._waiting._sequences}
        emissions = self.scheduler.apply(plan, tokens_for(plan.rows))
        expected = [
            row.request_id
            for row in plan.rows
            if row.samples and row.request_id not in self.answers and row.request_id not in waiting
        ]
        assert [emission.request_id for emission in emissions] == expected
        for row in plan.rows:
            if row.span.logits is Logits.ALL and row.request_id not in waiting:
                self.logits[row.request_id] += range(row.span.start, row.span.end)
        for emission in emissions:
            self.hear(emission)

    def hear(self, emission: Emission) -> None:
        request = self.live[emission.request_id]
        told = self.told[emission.request_id]
        position = len(request.prompt_token_ids) + len(told)
        assert emission.token_id == token_at(emission.request_id, position), "a token is repeated or skipped"
        told.append(emission.token_id)
        is_stop = emission.token_id in request.stop_token_ids
        is_full = len(told) == request.max_tokens or position + 1 == self.limits.max_model_len
        assert emission.finish_reason == ("stop" if is_stop else "length" if is_full else None)
        assert emission.stop_token_id == (emission.token_id if is_stop else None)
        if emission.finish_reason is None:
            return
        if request.prompt_logits_all:
            assert self.logits[emission.request_id] == list(range(len(request.prompt_token_ids)))
        del self.live[emission.request_id]
        self.answer(emission.request_id, emission.finish_reason)

    def check_plan(self, plan: Plan) -> None:
        rows, limits = plan.rows, self.limits
        assert rows or plan.frees, "an empty plan"
        assert len({row.request_id for row in rows}) == len(rows)
        assert len(rows) <= self.scheduler.row_limit <= limits.max_rows
        assert sum(len(row.span.token_ids) for row in rows) <= limits.max_num_batched_tokens
        all_logits = [row for row in rows if row.span.logits is Logits.ALL]
        assert sum(len(row.span.token_ids) for row in all_logits) <= limits.max_prompt_logits
        assert [row.is_decode for row in rows] == sorted((row.is_decode for row in rows), reverse=True)
        assert limits.mixed_steps or len(rows) <= 1 or all(row.is_decode for row in rows)
        self.ranks.check(rows)
        for row in rows:
            self.check_row(row)
        if rows:
            plan_command(rows, self.version)

    def check_row(self, row: PlanRow) -> None:
        request, span = self.live[row.request_id], row.span
        length = len(request.prompt_token_ids) + len(self.told[row.request_id])
        assert span.end <= length
        assert row.samples is (span.end == length)
        assert (span.logits is not Logits.NONE) or not row.samples
        assert span.logits is not Logits.LAST or row.samples
        assert span.token_ids == tuple(token_at(row.request_id, position) for position in range(span.start, span.end))

    def check(self) -> None:
        """The scheduler's books agree with one another and with the ranks."""
        scheduler = self.scheduler
        running = list(scheduler._running.values())
        owned = [block for sequence in running for block in sequence.blocks]
        assert len(set(owned)) == len(owned), "a block has two owners"
        assert len(owned) + scheduler.num_free_blocks == scheduler.num_total_blocks, "a block is lost"
        slots = [sequence.slot for sequence in running]
        assert len(set(slots)) == len(slots), "a slot is used twice"
        assert not set(slots) & set(scheduler._slots._free)
        assert len(slots) + len(scheduler._slots._free) == self.limits.max_batch_size, "a slot is lost"
        assert set(scheduler._live) == set(self.live)
        assert scheduler.num_running + scheduler.num_waiting == len(self.live)
        assert scheduler.num_waiting <= self.limits.max_queue_len + self.limits.max_batch_size
        for sequence in running:
            assert sequence.slot is not None
            if sequence.slot in self.ranks.lengths and sequence.slot not in scheduler._slots._left:
                assert sequence.num_computed == self.ranks.lengths[sequence.slot]
                assert sequence.blocks[: sequence.num_blocks_shipped] == self.ranks.tables[sequence.slot]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_random_history_breaks_an_invariant(name: str, seed: int, scale: int) -> None:
    limits = dataclasses.replace(BASE, **CONFIGURATIONS[name])
    reasons: set[str] = set()
    for repeat in range(scale):
        simulation = Simulation(limits, seed + 1_000 * repeat)
        simulation.run(NUM_STEPS)
        reasons |= set(simulation.answers.values())
        assert simulation.num_failed_steps > 0
        assert simulation.num_parts > 0
    assert {"length", "stop", "abort", "finish", "fail", "context_length_exceeded"} <= reasons


@pytest.mark.parametrize("name", ["tiny cache", "one token blocks", "long protection", "unmixed tiny cache"])
def test_the_small_caches_of_the_random_histories_force_preemptions(name: str) -> None:
    simulation = Simulation(dataclasses.replace(BASE, **CONFIGURATIONS[name]), 0)
    simulation.run(NUM_STEPS)
    assert simulation.scheduler.num_preemptions > 10
