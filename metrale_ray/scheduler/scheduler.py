# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Scheduler`: decides what every step runs. Continuous batching, chunked prefill, preemption by recompute.

Rules:
- Pure: requests and sampled tokens come in, plans and emissions go out. The same calls give the same plans.
- A sequence changes only in `apply`, so a failed step leaves lengths and block tables as they were.
- Order is priority (lower first), then arrival, and a sequence keeps its place for life.
- Decode rows first, one token each; what is left of the step's tokens goes to prompt chunks, in order. Chunks that
  want the logits of all their positions share `max_prompt_logits` of them per step.
- A sequence is admitted, first in order, when a slot, a row and blocks for all its tokens are there; the watermark
  stays free unless nothing runs. Nothing is admitted in a step that preempts, and nothing overtakes the first.
- When decode rows need more blocks than are free, sequences are preempted: of the lowest priority first, and never
  the first in order of those that run.

Who may starve:
- Within one priority nobody. The first in order always goes on and every sequence ends, so each has its turn.
- Across priorities: while requests of a higher priority keep coming and fill the slots or the cache, lower ones wait,
  or are preempted again and again. That is what a priority is for; a deadline bounds the wait.
- A sequence that waits never takes the slot of one that runs, so a high priority may wait for a low one to end or to
  be preempted. While fewer rows are allowed than sequences run, those that run take turns whatever their priority.

It leaves out clocks (see `deadlines`), sampling, stop strings, and the search for the row that makes a step fail (see
`blame`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from metrale_ray.protocol.commands import Logits, Span
from metrale_ray.scheduler.admission import check_request, check_room
from metrale_ray.scheduler.blocks import BlockPool
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.plan import Plan, PlanRow
from metrale_ray.scheduler.request import FinishReason, Request, RequestId, Sequence
from metrale_ray.scheduler.row_limit import RowLimit
from metrale_ray.scheduler.slots import SlotPool
from metrale_ray.scheduler.victim import choose_victim
from metrale_ray.scheduler.waiting import WaitingQueue

_LAST, _ALL = Logits.LAST, Logits.ALL  # looked up for each row of each step


class Emission(NamedTuple):
    """One new token of one request. `finish_reason` is None while more will come.

    `stop_token_id` is the token itself when it ended the request, else None.
    """

    request_id: RequestId
    token_id: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Scheduler:
    """The head's decision maker. One thread makes every call.

    The caller loops: `next_step`, run the plan on every rank, then `apply`, or `step_failed` and `apply` for parts of
    the plan that succeed alone. `abort`, `finish`, `fail` and `requeue` may come at any moment between these.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.num_aborted = 0
        self.num_failed = 0
        self.num_finished = 0
        self._blocks = BlockPool(limits.num_blocks)
        self._slots = SlotPool(limits.max_batch_size)
        self._live: dict[RequestId, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: dict[RequestId, Sequence] = {}
        self._open_rows: dict[RequestId, PlanRow] = {}  # planned and not settled
        self._is_under_way = False
        self._row_limit = RowLimit(limits.max_rows)
        self._turn = 0  # where the next step's rows start, when fewer rows are allowed than sequences run
        self._decoded_last = False
        self._num_arrived = 0

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have none, preempted ones included."""
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return self._blocks.num_free_blocks

    @property
    def num_total_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._blocks.num_total_blocks

    @property
    def row_limit(self) -> int:
        """Rows that a step may have now."""
        return self._row_limit.rows

    def sequences(self) -> list[Sequence]:
        """All that have not ended, whether they run or wait; the caller changes none."""
        return list(self._live.values())

    def add(self, *requests: Request) -> None:
        """Take requests into the queue, all of them, or raise RequestError at once; nothing has changed then."""
        sequences = self._sequences_of(requests)
        for sequence in sequences:
            self._live[sequence.request_id] = sequence
            self._waiting.add(sequence)
        self._num_arrived += len(sequences)

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request whose reader has gone; False when it is not here. A step under way gives it no token."""
        ended = self._end(request_id)
        self.num_aborted += ended
        return ended

    def finish(self, request_id: RequestId) -> bool:
        """End a request whose text is complete (a stop string); False when it is not here. Else as `abort`."""
        ended = self._end(request_id)
        self.num_finished += ended
        return ended

    def fail(self, request_id: RequestId) -> bool:
        """Drop a request that cannot be served; False when it is not here. Else as `abort`."""
        ended = self._end(request_id)
        self.num_failed += ended
        return ended

    def requeue(self, request_id: RequestId) -> bool:
        """Start a running request over in a fresh slot, from its prompt and generated tokens. False if it has no slot.

        For a slot whose state is unknown on some rank. No token of it is sampled again.
        """
        if request_id not in self._running:
            return False
        self._return_to_queue(self._running[request_id])
        return True

    def failure_unexplained(self) -> None:
        """All rows of the step that failed last succeeded in parts: steps may be too large, see `RowLimit`."""
        self._row_limit.unexplained()

    def next_step(self) -> Plan | None:
        """The next plan, or None when there is nothing to do. Raises RuntimeError while a plan is under way."""
        if self._is_under_way:
            raise RuntimeError("a plan is under way: call apply or step_failed for it before next_step")
        rows = self._mixed_rows() if self.limits.mixed_steps else self._unmixed_rows()
        frees = self._slots.frees()
        self._open_rows = {row.request_id: row for row in rows}
        self._is_under_way = bool(rows)
        return Plan(frees, tuple(rows)) if frees or rows else None

    def apply(self, plan: Plan, token_ids: Mapping[RequestId, int]) -> list[Emission]:
        """Settle a plan, or a part of the last failed one, that succeeded on every rank.

        `token_ids` has the token of each row that samples; those of requests that ended meanwhile are ignored. Raises
        ValueError, and settles nothing, when a row is not of the last plan, was settled before, or has no token.
        """
        open_rows = [row for row in plan.rows if self._is_open(row)]
        for row in open_rows:
            if row.samples and row.request_id not in token_ids:
                raise ValueError(f"no token for request {row.request_id}, whose row samples")
        self._is_under_way = False
        self._row_limit.succeeded()
        self._slots.hold([row.span.slot for row in plan.rows if row.span.start == 0])
        emissions: list[Emission] = []
        for row in open_rows:
            sequence = self._settle(row)
            if row.samples:
                emissions.append(self._extend(sequence, token_ids[row.request_id]))
        return emissions

    def step_failed(self, plan: Plan) -> None:
        """Nothing of `plan` was settled. Its rows may be run again in parts, or are planned again by `next_step`."""
        for row in plan.rows:
            self._is_open(row)
        self._is_under_way = False
        self._row_limit.failed()

    def _sequences_of(self, requests: Collection[Request]) -> list[Sequence]:
        """A sequence for each, in this order. Raises RequestError if one of them cannot be served."""
        sequences: dict[RequestId, Sequence] = {}
        for number, request in enumerate(requests):
            request_id = request.request_id
            max_length = check_request(request, self.limits, request_id in self._live or request_id in sequences)
            sequences[request_id] = Sequence(request, self._num_arrived + number, max_length, request.prompt_token_ids)
        prompts = {id(request.prompt_token_ids): len(request.prompt_token_ids) for request in requests}
        check_room(len(requests), sum(prompts.values()), self._waiting, self.limits)
        return list(sequences.values())

    # What a step runs.

    def _mixed_rows(self) -> list[PlanRow]:
        decoding, prefilling = self._turns()
        num_preemptions = self.num_preemptions
        rows = self._decode_rows(self._secure_blocks(decoding))
        max_rows, budget = self.row_limit - len(rows), self.limits.max_num_batched_tokens - len(rows)
        rows += self._prefill_rows(prefilling, max_rows, budget, self.num_preemptions == num_preemptions)
        return rows

    def _unmixed_rows(self) -> list[PlanRow]:
        """Decode rows and single prompt chunks take turns, where both want to run."""
        decoding, prefilling = self._turns()
        rows: list[PlanRow] = []
        if self._decoded_last or not decoding:
            rows = self._prefill_rows(prefilling, 1, self.limits.max_num_batched_tokens, True)
        self._decoded_last = not rows
        return rows or self._decode_rows(self._secure_blocks(decoding))

    def _turns(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that may have a row in this step: those that decode, and those that prefill."""
        running = list(self._running.values())
        row_limit = self._row_limit.rows
        if len(running) > row_limit:
            start = self._turn % len(running)
            self._turn = start + row_limit
            running = (running[start:] + running[:start])[:row_limit]
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in running:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        return decoding, prefilling

    def _decode_rows(self, decoding: list[Sequence]) -> list[PlanRow]:
        return [self._decode_row(sequence) for sequence in decoding]

    def _decode_row(self, sequence: Sequence) -> PlanRow:
        """As `_row`, without slices: there are many of these in each step."""
        assert sequence.slot is not None
        has_new = len(sequence.blocks) > sequence.num_blocks_shipped
        new_blocks = tuple(sequence.blocks[sequence.num_blocks_shipped :]) if has_new else ()
        span = Span(sequence.slot, sequence.num_computed, (sequence.tokens[-1],), new_blocks, _LAST)
        return PlanRow(sequence.request.request_id, span, True)

    def _prefill_rows(self, prefilling: list[Sequence], max_rows: int, budget: int, may_admit: bool) -> list[PlanRow]:
        """Chunks of at most `budget` tokens together, of sequences that run and of those admitted now, in order."""
        rows: list[PlanRow] = []
        logits_left = self.limits.max_prompt_logits
        todo = [sequence for sequence in prefilling if sequence.slot is not None]  # the others were preempted just now
        todo.sort(key=lambda sequence: sequence.order, reverse=True)
        while len(rows) < max_rows and budget > 0:
            sequence = self._next_to_prefill(todo, may_admit)
            if sequence is None:
                break
            room = min(budget, logits_left) if sequence.wants_prompt_logits else budget
            if room == 0:
                continue  # it keeps its slot and its place
            row = self._row(sequence, sequence.chunk_end(room))
            budget -= len(row.span.token_ids)
            if row.span.logits is _ALL:
                logits_left -= len(row.span.token_ids)
            rows.append(row)
        return rows

    def _next_to_prefill(self, todo: list[Sequence], may_admit: bool) -> Sequence | None:
        """The first in order of `todo`, whose last is the first, and of the one that may be admitted next."""
        waiting = self._waiting.first() if may_admit else None
        if waiting is not None and (not todo or waiting.order < todo[-1].order) and self._admit(waiting):
            return waiting
        return todo.pop() if todo else None

    def _row(self, sequence: Sequence, end: int) -> PlanRow:
        """The row that computes the tokens from the settled length to `end`; the blocks are there."""
        assert sequence.slot is not None
        start = sequence.num_computed
        num_blocks = -(-end // self.limits.block_size)
        new_blocks = tuple(sequence.blocks[sequence.num_blocks_shipped : num_blocks])
        logits = sequence.logits_until(end)
        span = Span(sequence.slot, start, tuple(sequence.tokens[start:end]), new_blocks, logits)
        return PlanRow(sequence.request_id, span, end == len(sequence.tokens))

    # Who runs.

    def _admit(self, sequence: Sequence) -> bool:
        """Give one that waits a slot and blocks for all its tokens, or False when that cannot be."""
        if len(self._running) >= self.row_limit:
            return False
        num_blocks = -(-len(sequence.tokens) // self.limits.block_size)
        kept_free = self.limits.watermark_blocks if self._running else 0
        if self._slots.num_free == 0 or num_blocks + kept_free > self._blocks.num_free_blocks:
            return False
        self._waiting.remove(sequence)
        sequence.slot = self._slots.take()
        sequence.blocks = self._blocks.allocate(num_blocks)
        self._running[sequence.request_id] = sequence
        return True

    def _secure_blocks(self, decoding: list[Sequence]) -> list[Sequence]:
        """Give each decoding sequence the block that its next token needs; those left after preemptions."""
        size = self.limits.block_size
        needy = [sequence for sequence in decoding if sequence.num_computed == len(sequence.blocks) * size]
        if not needy:
            return decoding
        num_preemptions = self.num_preemptions
        while len(needy) > self._blocks.num_free_blocks:
            self._preempt(choose_victim(self._running.values(), self.limits.resume_protection_tokens))
            needy = [sequence for sequence in needy if sequence.slot is not None]
        for sequence in needy:
            sequence.blocks += self._blocks.allocate(1)
        if self.num_preemptions == num_preemptions:
            return decoding
        return [sequence for sequence in decoding if sequence.slot is not None]

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._return_to_queue(sequence)

    def _return_to_queue(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.start_over()
        self._waiting.add(sequence)

    def _end(self, request_id: RequestId) -> bool:
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._stop_running(sequence)
        return True

    def _stop_running(self, sequence: Sequence) -> None:
        """Take back blocks and slot. The next plan frees the slot on the ranks before its rows use either again."""
        assert sequence.slot is not None
        del self._running[sequence.request_id]
        self._open_rows.pop(sequence.request_id, None)
        self._blocks.release(sequence.blocks)
        self._slots.give_back(sequence.slot)

    # What a step gave.

    def _is_open(self, row: PlanRow) -> bool:
        """Whether `row` waits to be settled. False when its request ended or started over; else ValueError."""
        open_row = self._open_rows.get(row.request_id)
        if open_row is row or open_row == row:
            return True
        sequence = self._live.get(row.request_id)
        if sequence is None or sequence.slot is None:
            return False
        raise ValueError(f"request {row.request_id} has no such row in the last plan, or it was settled before: {row}")

    def _settle(self, row: PlanRow) -> Sequence:
        """The sequence of an open row, which every rank has computed now."""
        del self._open_rows[row.request_id]
        span, sequence = row.span, self._live[row.request_id]
        sequence.num_computed = span.start + len(span.token_ids)
        if span.new_blocks:
            sequence.num_blocks_shipped += len(span.new_blocks)
        if span.logits is _ALL:
            sequence.num_prompt_logits = span.end
        return sequence

    def _extend(self, sequence: Sequence, token_id: int) -> Emission:
        request = sequence.request
        sequence.append(token_id)
        if token_id in request.stop_token_ids:
            return self._last(request, token_id, "stop")
        if len(sequence.tokens) >= sequence.max_length:
            return self._last(request, token_id, "length")
        return Emission(request.request_id, token_id)

    def _last(self, request: Request, token_id: int, reason: FinishReason) -> Emission:
        self.finish(request.request_id)
        return Emission(request.request_id, token_id, reason, token_id if reason == "stop" else None)
