# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests with a known token stream, and a mirror of what the ranks hold, for the scheduler's tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.protocol.commands import BlockId, Logits, Slot, Span
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.plan import Plan, PlanRow
from metrale_ray.scheduler.request import Request, RequestId
from metrale_ray.scheduler.scheduler import Emission, Scheduler

ROOMY = SchedulerLimits(
    max_batch_size=4, max_model_len=64, max_num_batched_tokens=16, num_blocks=64, block_size=4, watermark=0.0
)


def token_at(request_id: int, position: int) -> int:
    """The token that stands at `position` of a request's stream, prompt or generated."""
    return (request_id * 7919 + position * 104_729) % 50_021


def a_request(request_id: int, num_prompt: int = 4, max_tokens: int = 4, **fields: Any) -> Request:
    """A request whose prompt is the beginning of its stream."""
    prompt = tuple(token_at(request_id, position) for position in range(num_prompt))
    return Request(RequestId(request_id), prompt, max_tokens, **fields)


def tokens_for(rows: Iterable[PlanRow]) -> dict[RequestId, int]:
    """What a model that follows the streams gives for rows that sample."""
    return {row.request_id: token_at(row.request_id, row.span.end) for row in rows if row.samples}


def step(scheduler: Scheduler) -> tuple[Plan, list[Emission]]:
    """One step that succeeds."""
    plan = scheduler.next_step()
    assert plan is not None
    return plan, scheduler.apply(plan, tokens_for(plan.rows))


def run_to_end(scheduler: Scheduler, max_steps: int = 10_000) -> dict[RequestId, list[int]]:
    """All that is emitted until nothing is left to do, by request."""
    emitted: dict[RequestId, list[int]] = {}
    for _ in range(max_steps):
        plan = scheduler.next_step()
        if plan is None:
            return emitted
        for emission in scheduler.apply(plan, tokens_for(plan.rows)):
            emitted.setdefault(emission.request_id, []).append(emission.token_id)
    raise AssertionError(f"still not done after {max_steps} steps")


@dataclass
class RankMirror:
    """What every rank holds, and its refusal of what does not fit: written from the protocol alone."""

    limits: SchedulerLimits
    lengths: dict[Slot, int] = field(default_factory=dict)
    tables: dict[Slot, list[BlockId]] = field(default_factory=dict)

    def free(self, slot: Slot) -> None:
        assert slot in self.lengths, f"slot {slot} is free already"
        del self.lengths[slot], self.tables[slot]

    def check(self, rows: Iterable[PlanRow]) -> None:
        """Every row could be carried out, together with the others."""
        owned = {block for table in self.tables.values() for block in table}
        slots: set[Slot] = set()
        for row in rows:
            span = row.span
            assert span.slot not in slots, "a slot is in the step twice"
            assert 0 <= span.slot < self.limits.max_batch_size
            slots.add(span.slot)
            self._check_span(span)
            for block in span.new_blocks:
                assert 0 <= block < self.limits.num_blocks
                assert block not in owned, f"block {block} has two owners"
                owned.add(block)

    def settle(self, rows: Iterable[PlanRow]) -> None:
        for row in rows:
            self.lengths[row.span.slot] = row.span.end
            self.tables.setdefault(row.span.slot, []).extend(row.span.new_blocks)

    def _check_span(self, span: Span) -> None:
        assert span.start == self.lengths.get(span.slot, 0), "a span does not start at the settled length"
        assert span.token_ids
        assert span.end <= self.limits.max_model_len
        num_blocks = len(self.tables.get(span.slot, [])) + len(span.new_blocks)
        assert num_blocks == -(-span.end // self.limits.block_size), "blocks do not exactly cover the tokens"


def a_row(request_id: int, start: int = 8, num_tokens: int = 1, logits: Logits = Logits.LAST) -> PlanRow:
    """A row for tests that need no scheduler, in the slot that has the request's number."""
    span = Span(Slot(request_id), start, tuple(range(num_tokens)), (), logits)
    return PlanRow(RequestId(request_id), span, logits is not Logits.NONE)
