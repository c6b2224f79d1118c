# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mistakes about requests: whose turn it is, what ends them, what outlives a preemption, and how answers reach readers.

See `mutations`, where all mistakes are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from metrale_ray import engine as engine_module
from metrale_ray.engine import Engine
from metrale_ray.inbox import Inbox
from metrale_ray.protocol import verdict
from metrale_ray.protocol.front import Abort, Finish
from metrale_ray.protocol.front.handle import RequestHandle
from metrale_ray.protocol.front.outbox import Outbox
from metrale_ray.protocol.front.server import FrontServer
from metrale_ray.recovery import Recovery
from metrale_ray.scheduler import scheduler as scheduler_module
from metrale_ray.scheduler.request import Sequence
from metrale_ray.scheduler.scheduler import Scheduler
from tests.simulation.mutation import Mutation, replaced

# Whose turn it is --------------------------------------------------------------------------------------------------


def _by_arrival(order: Any) -> Any:
    return property(lambda self: (0, self.arrival))


def _highest_goes(choose: Any) -> Any:
    def choose_highest(running: Collection[Sequence], protection_tokens: int) -> Sequence:
        return sorted(running, key=lambda sequence: sequence.order)[1]

    return choose_highest


def _first_goes(choose: Any) -> Any:
    def choose_youngest(running: Collection[Sequence], protection_tokens: int) -> Sequence:
        return min(running, key=lambda sequence: sequence.num_generated)

    return choose_youngest


def _overtake(choose: Any) -> Any:
    def choose_who_fits(self: Scheduler, todo: list[Sequence], may_admit: bool) -> Sequence | None:
        for waiting in reversed(self._waiting._sequences[-2:]) if may_admit else ():
            if self._admit(waiting):
                return waiting
        return todo.pop() if todo else None

    return choose_who_fits


def _admit_always(prefill: Any) -> Any:
    return lambda self, prefilling, max_rows, budget, may_admit: prefill(self, prefilling, max_rows, budget, True)


# What ends them ----------------------------------------------------------------------------------------------------


def _only_those_that_run(expire: Any) -> Any:
    def expire_running(self: Engine, now_s: float) -> None:
        late = [each for each in self._deadlines.take_late(now_s) if each in self.scheduler._running]
        if late:
            self.counters.expired_requests += len(late)
            self._deliver([self._fail(request_id, "deadline_exceeded", "") for request_id in late])

    return expire_running


def _only_the_first(submit: Any) -> Any:
    def submit_late(self: Engine, request_ids: Any, *arguments: Any, **named: Any) -> None:
        submit(self, request_ids, *arguments, **named)
        for request_id in request_ids[1:]:
            self._deadlines.drop(request_id)

    return submit_late


def _keep_deadlines(forget: Any) -> Any:
    def forget_most(self: Engine, *arguments: Any) -> bool:
        with mock.patch.object(self._deadlines, "drop"):
            return bool(forget(self, *arguments))

    return forget_most


def _no_abort_while_compiling(end: Any) -> Any:
    def end_most(self: Inbox, front: Any, said: Abort | Finish) -> None:
        if not (isinstance(said, Abort) and (front, said.request_id) in self._preparing):
            end(self, front, said)

    return end_most


def _no_finish_while_waiting(end: Any) -> Any:
    def end_most(self: Inbox, front: Any, said: Abort | Finish) -> None:
        if not (isinstance(said, Finish) and self._find((front, said.request_id)) is not None):
            end(self, front, said)

    return end_most


def _leave_untold(drop: Any) -> Any:
    def drop_quietly(self: FrontServer, session: Any, reason: str | None) -> None:
        if reason is None:
            self._forget(session)
        else:
            drop(self, session, reason)

    return drop_quietly


def _give_up_at_once(punish: Any) -> Any:
    def punish_at_once(self: Recovery, scheduler: Scheduler, request_id: Any, failure: Any) -> Any:
        live = self._live.get(request_id)
        if live is not None:
            live.was_poisoned = True
        return punish(self, scheduler, request_id, failure)

    return punish_at_once


def _never_give_up(punish: Any) -> Any:
    def punish_never(self: Recovery, scheduler: Scheduler, request_id: Any, failure: Any) -> Any:
        live = self._live.get(request_id)
        if live is not None:
            live.was_poisoned = False
        return punish(self, scheduler, request_id, failure)

    return punish_never


def _name_another(odd_one: Any) -> Any:
    def name_another(values: Any) -> Any:
        odd = odd_one(values)
        return odd and odd._replace(rank=next(rank for rank in values if rank != odd.rank))

    return name_another


# What outlives a preemption ----------------------------------------------------------------------------------------


def _at_preemption(spoil: Callable[[Engine, Sequence], None]) -> Callable[[], AbstractContextManager[Any]]:
    @contextmanager
    def apply() -> Iterator[None]:
        engines: dict[Scheduler, Engine] = {}
        start, back = Engine.start, Scheduler._return_to_queue

        def start_known(self: Engine, scheduler: Scheduler, *arguments: Any) -> None:
            engines[scheduler] = self
            start(self, scheduler, *arguments)

        def back_spoilt(self: Scheduler, sequence: Sequence) -> None:
            spoil(engines[self], sequence)
            back(self, sequence)

        with (
            mock.patch.object(Engine, "start", start_known),
            mock.patch.object(Scheduler, "_return_to_queue", back_spoilt),
        ):
            yield

    return apply


def _forget_history(engine: Engine, sequence: Sequence) -> None:
    live = engine._live.get(sequence.request_id)
    if live is not None:
        live._history = None


def _advance_again(engine: Engine, sequence: Sequence) -> None:
    live = engine._live.get(sequence.request_id)
    if live is not None and live.constraint is not None and sequence.num_generated:
        live.constraint.advance(sequence.tokens[-1])


def _seed_of_another(derived: Any) -> Any:
    return lambda seed, request_id: derived(seed, request_id + request_id % 2)


# How answers reach readers -----------------------------------------------------------------------------------------


def _end_with_the_first(ends_with: Any) -> Any:
    return lambda self, output: output.is_refusal or output.finish_reason is not None


def _die_at_once(die: Any) -> Any:
    def die_unread(self: RequestHandle, death: Any) -> None:
        self._outputs.clear()
        die(self, death)

    return die_unread


def _lose_what_is_held(next_frame: Any) -> Any:
    def next_frame_of_some(self: Outbox) -> Any:
        if not self._has_credit() and len(self._held) > 2:
            self._held.pop()
        return next_frame(self)

    return next_frame_of_some


REQUEST_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("ignore priorities", lambda: replaced(Sequence, "order", _by_arrival)),
    Mutation("preempt who matters more", lambda: replaced(scheduler_module, "choose_victim", _highest_goes)),
    Mutation("preempt the first", lambda: replaced(scheduler_module, "choose_victim", _first_goes)),
    Mutation("overtake the first that waits", lambda: replaced(Scheduler, "_next_to_prefill", _overtake)),
    Mutation("admit in a step that preempts", lambda: replaced(Scheduler, "_prefill_rows", _admit_always)),
    Mutation("no deadline for what waits", lambda: replaced(Engine, "expire", _only_those_that_run)),
    Mutation("a deadline for one sequence of several", lambda: replaced(Engine, "submit", _only_the_first)),
    Mutation("keep the deadline of what has ended", lambda: replaced(Engine, "_forget", _keep_deadlines)),
    Mutation("lose an abort while a grammar is compiled", lambda: replaced(Inbox, "end", _no_abort_while_compiling)),
    Mutation("lose a finish in the inbox", lambda: replaced(Inbox, "end", _no_finish_while_waiting)),
    Mutation("tell nobody that a front has left", lambda: replaced(FrontServer, "_drop", _leave_untold)),
    Mutation("fail the first poisoned slot", lambda: replaced(Recovery, "_punish", _give_up_at_once)),
    Mutation("try poisoned slots for ever", lambda: replaced(Recovery, "_punish", _never_give_up)),
    Mutation("name another rank", lambda: replaced(verdict, "_odd_one", _name_another)),
    Mutation("forget penalties when preempted", _at_preemption(_forget_history)),
    Mutation("advance a grammar twice when preempted", _at_preemption(_advance_again)),
    Mutation("derive another's seed", lambda: replaced(engine_module, "_derived_seed", _seed_of_another)),
    Mutation("end a handle with its first sequence", lambda: replaced(RequestHandle, "ends_with", _end_with_the_first)),
    Mutation("die before all is read", lambda: replaced(RequestHandle, "die", _die_at_once)),
    Mutation("lose outputs that are held", lambda: replaced(Outbox, "next_frame", _lose_what_is_held)),
)
