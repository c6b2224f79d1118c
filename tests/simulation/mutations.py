# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mistakes made in the engine on purpose, each of which the simulation must find.

Rules: a mutation replaces one method of the engine while it lasts, as a slip of its author would have. It is found
when a seed fails with it and passes without. `python -m tests.simulation mutations` runs them all and prints, for each,
how many seeds it took and what found it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from metrale_ray.desk import Desk
from metrale_ray.engine import Engine
from metrale_ray.inbox import Ending, Gone
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.slots import Slots
from metrale_ray.orders import Orders
from metrale_ray.protocol import session, verdict
from metrale_ray.protocol.commands import CommandFrame, FreeSlot, Reply, Settled, Slot
from metrale_ray.protocol.front import Abort, Finish
from metrale_ray.protocol.front.handle import RequestHandle
from metrale_ray.protocol.session import HeadSession, WorkerSession
from metrale_ray.protocol.verdict import Kind, Verdict
from metrale_ray.scheduler.blame import BlameSearch
from metrale_ray.scheduler.blame import Verdict as BlameVerdict
from metrale_ray.scheduler.request import Sequence as RequestSequence
from metrale_ray.scheduler.scheduler import Scheduler
from metrale_ray.scheduler.slots import SlotPool
from tests.simulation.mutation import Mutation, replaced
from tests.simulation.request_mutations import REQUEST_MUTATIONS

# The protocol ------------------------------------------------------------------------------------------------------


def _skip_a_settled(settle: Any) -> Any:
    def settle_most(self: Slots, settled: Settled | None) -> None:
        if settled is not None and settled.ok and settled.seq % 7 == 0:
            settled = Settled(settled.seq, False)
        settle(self, settled)

    return settle_most


def _settle_what_failed(settle: Any) -> Any:
    return lambda self, ok: settle(self, True)


def _any_reply(check: Any) -> Any:
    def check_young(frame: CommandFrame, reply: Reply, rank: int) -> None:
        if reply.epoch >= frame.envelope.epoch:
            check(frame, reply, rank)

    return check_young


def _any_command(accept: Any) -> Any:
    def accept_old(self: WorkerSession, frame: CommandFrame) -> None:
        if frame.envelope.epoch == self.epoch:
            accept(self, frame)

    return accept_old


def _forget_the_flag(report: Any) -> Any:
    def report_nothing(self: Collectives) -> None:
        self._remaining = 0

    return report_nothing


def _no_comparison(compare: Any) -> Any:
    return lambda *arguments, **named: None


def _one_rank_is_enough(judge: Any) -> Any:
    return lambda frame, replies, *rest: judge(frame, replies[:1], *rest)


# The head ----------------------------------------------------------------------------------------------------------


def _free_twice(free: Any) -> Any:
    def free_twice(self: Engine, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._orders.run_rowless(FreeSlot(slot))
            self._orders.run(FreeSlot(slot))

    return free_twice


def _drop_aborts(end: Any) -> Any:
    def end_others(self: Desk, engine: Engine, ending: Ending | Gone) -> None:
        if isinstance(ending, Gone) or not isinstance(ending.said, Abort):
            end(self, engine, ending)

    return end_others


def _forget_who_went(end: Any) -> Any:
    def end_others(self: Desk, engine: Engine, ending: Ending | Gone) -> None:
        if isinstance(ending, Gone):
            for request_id in self.clients.of_front(ending.front):
                self.clients.drop(request_id)
                engine._live.pop(request_id, None)
        else:
            end(self, engine, ending)

    return end_others


def _finish_the_other(end: Any) -> Any:
    def end_another(self: Desk, engine: Engine, ending: Ending | Gone) -> None:
        if isinstance(ending, Ending) and isinstance(ending.said, Finish) and ending.arrived is None:
            ending = replace(ending, said=Finish(ending.said.request_id, max(0, ending.said.index - 1)))
        end(self, engine, ending)

    return end_another


def _deliver_before_the_verdict(run: Any) -> Any:
    def run_hopefully(self: Orders, command: Any, *arguments: Any, **named: Any) -> Verdict:
        outcome: Verdict = run(self, command, *arguments, **named)
        has_logits = self._replica.logits is not None
        return Verdict(Kind.OK) if has_logits and outcome.kind is Kind.FAILED else outcome

    return run_hopefully


def _deliver_twice(deliver: Any) -> Any:
    def deliver_ends_twice(self: Desk, deliveries: list[Any]) -> None:
        for delivery in deliveries:
            client = self.clients.get(delivery.request_id)
            if client is not None and delivery.finish_reason == "stop":
                deliver(self, [replace(delivery, finish_reason="length", stop_token_id=None)])
                self.clients._by_request[delivery.request_id] = client
                self.clients._by_client.setdefault(client[:2], {})[client.sequence_index] = delivery.request_id
        deliver(self, deliveries)

    return deliver_ends_twice


def _no_deadlines(expire: Any) -> Any:
    return lambda self, now_s: None


def _convict_a_neighbour(verdict_of: Any) -> Any:
    def neighbour(self: BlameSearch) -> BlameVerdict | None:
        found: BlameVerdict | None = verdict_of.fget(self)
        others = [row.request_id for row in self._first_rows if found and row.request_id not in found.guilty]
        return replace(found, guilty=tuple(others[:1])) if found is not None and found.guilty and others else found

    return property(neighbour)


@contextmanager
def _convicted_neighbours() -> Iterator[None]:
    made = BlameSearch.__init__

    def remember(self: Any, rows: Any, deadline_steps: int) -> None:
        self._first_rows = tuple(rows)
        made(self, rows, deadline_steps)

    with mock.patch.object(BlameSearch, "__init__", remember), replaced(BlameSearch, "verdict", _convict_a_neighbour):
        yield


def _lose_a_wake_up(put: Any) -> Any:
    def put_quietly(self: RequestHandle, output: Any) -> None:
        wake, is_last = self._wake, output.finish_reason == "stop"
        with mock.patch.object(RequestHandle, "_wake", (lambda me: None) if is_last else (lambda me: wake())):
            put(self, output)

    return put_quietly


# Blocks, slots and sequences ---------------------------------------------------------------------------------------


def _keep_a_block(release: Any) -> Any:
    def release_most(self: Slots, slot: Slot) -> None:
        kept = self._live[slot].block_table[-1:]
        release(self, slot)
        for block in kept:
            self._owned[block] = 1

    return release_most


def _leak_a_block(stop: Any) -> Any:
    def stop_and_leak(self: Scheduler, sequence: RequestSequence) -> None:
        if len(sequence.blocks) > 3:
            sequence.blocks.pop()
        stop(self, sequence)

    return stop_and_leak


def _leak_a_slot(give_back: Any) -> Any:
    def give_back_quietly(self: SlotPool, slot: Slot) -> None:
        give_back(self, slot)
        if len(self._left) > 1:
            self._left.pop()

    return give_back_quietly


def _requeue_without_freeing(back: Any) -> Any:
    def keep(self: Scheduler, sequence: RequestSequence) -> None:
        del self._running[sequence.request_id]
        self._blocks.release(sequence.blocks)
        sequence.start_over()
        self._waiting.add(sequence)

    return keep


def _off_by_one_start(row: Any) -> Any:
    def row_later(self: Scheduler, sequence: RequestSequence, end: int) -> Any:
        made = row(self, sequence, end)
        if made.span.start and len(made.span.token_ids) > 1:
            made = replace(made, span=replace(made.span, start=made.span.start - 1))
        return made

    return row_later


def _lose_a_token_when_preempted(start_over: Any) -> Any:
    def start_over_earlier(self: RequestSequence) -> None:
        if self.num_generated > 1 and isinstance(self.tokens, list):
            self.tokens.pop()
        start_over(self)

    return start_over_earlier


def _stale_blocks_after_preemption(start_over: Any) -> Any:
    def start_over_shipped(self: RequestSequence) -> None:
        shipped = self.num_blocks_shipped
        start_over(self)
        self.num_blocks_shipped = min(1, shipped)

    return start_over_shipped


def _tell_prompts_again(start_over: Any) -> Any:
    def start_over_untold(self: RequestSequence) -> None:
        start_over(self)
        self.num_prompt_logits = 0

    return start_over_untold


def _forget_who_holds(hold: Any) -> Any:
    return lambda self, slots: hold(self, list(slots)[1:])


def _drop_a_failed_effect_in_part(drop: Any) -> Any:
    def drop_lengths_only(self: Slots, staged: Any) -> None:
        for seq, span, _ in staged.rows:
            if seq.length == 0:
                self._release(span.slot)

    return drop_lengths_only


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("skip a settled", lambda: replaced(Slots, "settle", _skip_a_settled)),
    Mutation("settle as ok what failed", lambda: replaced(HeadSession, "settle", _settle_what_failed)),
    Mutation("take a reply of an old epoch", lambda: _both("check_reply", _any_reply)),
    Mutation("pass over commands of an old epoch", lambda: replaced(WorkerSession, "accept", _any_command)),
    Mutation("forget the flag", lambda: replaced(Collectives, "report_failure", _forget_the_flag)),
    Mutation("compare no digests", lambda: replaced(verdict, "_compare_digests", _no_comparison)),
    Mutation(
        "judge by rank 0 alone", lambda: mock.patch("metrale_ray.orders.judge", _one_rank_is_enough(verdict.judge))
    ),
    Mutation("free a slot twice", lambda: replaced(Engine, "_free", _free_twice)),
    Mutation("drop an abort", lambda: replaced(Desk, "_end", _drop_aborts)),
    Mutation("forget a front's requests when it goes", lambda: replaced(Desk, "_end", _forget_who_went)),
    Mutation("finish another sequence", lambda: replaced(Desk, "_end", _finish_the_other)),
    Mutation("deliver before the verdict", lambda: replaced(Orders, "run", _deliver_before_the_verdict)),
    Mutation("answer twice", lambda: replaced(Desk, "deliver", _deliver_twice)),
    Mutation("forget deadlines", lambda: replaced(Engine, "expire", _no_deadlines)),
    Mutation("convict a neighbour", _convicted_neighbours),
    Mutation("lose a wake-up", lambda: replaced(RequestHandle, "put", _lose_a_wake_up)),
    Mutation("keep a block after a free", lambda: replaced(Slots, "_release", _keep_a_block)),
    Mutation("leak a block", lambda: replaced(Scheduler, "_stop_running", _leak_a_block)),
    Mutation("leak a slot", lambda: replaced(SlotPool, "give_back", _leak_a_slot)),
    Mutation("requeue without freeing", lambda: replaced(Scheduler, "_return_to_queue", _requeue_without_freeing)),
    Mutation("start off by one", lambda: replaced(Scheduler, "_row", _off_by_one_start)),
    Mutation(
        "lose a token when preempted", lambda: replaced(RequestSequence, "start_over", _lose_a_token_when_preempted)
    ),
    Mutation(
        "ship no first block after a preemption",
        lambda: replaced(RequestSequence, "start_over", _stale_blocks_after_preemption),
    ),
    Mutation("tell a prompt's logits again", lambda: replaced(RequestSequence, "start_over", _tell_prompts_again)),
    Mutation("forget that a slot is held", lambda: replaced(SlotPool, "hold", _forget_who_holds)),
    Mutation("keep the blocks of a failed step", lambda: replaced(Slots, "_drop", _drop_a_failed_effect_in_part)),
    *REQUEST_MUTATIONS,
)


@contextmanager
def _both(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A function of `session`, where it is defined and where the links have it from."""
    changed = make(getattr(session, name))
    with mock.patch.object(session, name, changed), mock.patch(f"metrale_ray.protocol.link.{name}", changed):
        yield
