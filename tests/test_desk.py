# SPDX-License-Identifier: MIT OR Apache-2.0
"""Between the fronts and the engine, with an engine that takes everything: what is heard between steps, and said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from metrale_ray import desk as desk_module
from metrale_ray.counters import Counters
from metrale_ray.desk import MAX_REQUESTS, ByFront, Desk
from metrale_ray.engine import Delivery
from metrale_ray.errors import RequestError
from metrale_ray.inbox import Inbox
from metrale_ray.protocol.front import Abort, Finish, FrontId, Output, Submit
from metrale_ray.recording import Recording
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import RequestId
from metrale_ray.timelines import Timelines

ONE, TWO = FrontId(1), FrontId(2)


class Engine:
    """Writes down what it is asked, and refuses prompts of token 13."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.counters, self.timelines, self.recording = Counters(), Timelines(), Recording()

    def submit(self, request_ids: Sequence[RequestId], prompt: tuple[int, ...], params: Any, **said: Any) -> None:
        if 13 in prompt:
            raise RequestError("no 13", code="unlucky")
        self.asked += [("submit", request_id) for request_id in request_ids]

    def abort(self, request_id: RequestId) -> None:
        self.asked.append(("abort", request_id))

    def finish(self, request_id: RequestId) -> None:
        self.asked.append(("finish", request_id))


class Room:
    """A desk with its inbox and engine; `sent` and `dropped` are what came of it."""

    def __init__(self) -> None:
        self.inbox = Inbox(10_000)
        self.engine: Any = Engine()
        self.sent: list[ByFront] = []
        self.dropped: list[tuple[FrontId, str]] = []
        self.desk = Desk(self.inbox, self.sent.append, lambda front, reason: self.dropped.append((front, reason)))

    def submit(self, number: int, n: int = 1, front: FrontId = ONE, token_id: int = 1) -> None:
        self.inbox.submit(front, Submit(number, (token_id,), TokenParams(n=n)), 0.0)

    def take(self) -> bool:
        has_answers = self.desk.take(self.engine)
        self.desk.flush()
        return has_answers


@pytest.fixture
def room() -> Room:
    return Room()


def test_requests_are_heard_in_order_and_only_so_many_between_two_steps(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "MAX_TAKE_S", 60.0)
    for number in range(MAX_REQUESTS + 5):
        room.submit(number)
    assert not room.take()
    assert room.engine.asked == [("submit", number) for number in range(MAX_REQUESTS)]
    room.take()
    assert len(room.engine.asked) == MAX_REQUESTS + 5
    assert not room.sent


def test_when_the_time_is_up_one_end_and_one_request_are_heard_all_the_same(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "MAX_TAKE_S", 0.0)
    for number in (1, 2):
        room.submit(number)
    room.take()
    room.take()
    for number in (3, 4):
        room.submit(number)
        room.inbox.end(ONE, Abort(number - 2))
    room.take()
    assert room.engine.asked[2:] == [("abort", 0), ("submit", 2)]


def test_ends_go_before_requests_and_all_answers_go_out_together(room: Room) -> None:
    for number in range(100):
        room.submit(number, front=TWO if number == 7 else ONE)
    while len(room.inbox):
        room.take()
    for number in range(100):
        room.inbox.end(TWO if number == 7 else ONE, Abort(number))
    room.submit(200)
    room.submit(201, token_id=13)
    assert room.take()
    assert room.engine.asked[-1] == ("submit", 100)
    (sent,) = room.sent
    assert [output.request_id for output in sent[ONE]] == [*(n for n in range(100) if n != 7), 201]
    assert sent[TWO] == [Output(7, 0, (), "abort")]
    assert sent[ONE][-1] == Output(201, 0, (), "error", None, ("unlucky", "no 13"), is_refusal=True)
    assert room.engine.counters.by_refusal == {"unlucky": 1}


def test_what_ends_before_the_engine_hears_of_it_is_answered_for_each_sequence(room: Room) -> None:
    room.submit(1, n=3)
    room.inbox.end(ONE, Finish(1, 1))
    room.inbox.end(ONE, Abort(1))
    room.take()
    assert not room.engine.asked
    assert room.sent == [{ONE: [Output(1, i, (), reason) for i, reason in enumerate(("abort", "stop", "abort"))]}]  # type: ignore[arg-type]
    assert len(room.desk.clients) == 0
    assert room.engine.timelines.finished == {"stop": 1, "length": 0, "abort": 2, "error": 0}


def test_a_sequence_that_was_finished_while_its_request_waited_is_finished_at_once(room: Room) -> None:
    room.submit(1, n=2)
    room.inbox.end(ONE, Finish(1, 1))
    room.take()
    assert room.engine.asked == [("submit", 0), ("submit", 1), ("finish", 1)]
    assert room.sent == [{ONE: [Output(1, 1, (), "stop")]}]


def test_a_number_that_runs_is_not_taken_again_and_its_front_is_dropped(room: Room) -> None:
    room.submit(1)
    room.take()
    room.submit(1)
    room.take()
    assert room.engine.asked == [("submit", 0)]
    assert room.dropped == [(ONE, "it sent request 1 again, which has not ended; each request has a number of its own")]
    room.inbox.gone(ONE)
    room.take()
    assert room.engine.asked[1:] == [("abort", 0)]
    assert not room.sent
    assert len(room.desk.clients) == 0


def test_a_step_goes_to_the_fronts_that_still_wait_behind_what_was_answered_before(room: Room) -> None:
    for number, front in ((1, ONE), (2, ONE), (1, TWO)):
        room.submit(number, front=front)
    room.take()
    room.inbox.gone(TWO)
    room.inbox.end(ONE, Abort(2))
    room.desk.take(room.engine)
    room.desk.deliver([Delivery(RequestId(n), (n + 10,), None) for n in range(3)])
    room.desk.deliver([Delivery(RequestId(0), (20,), "length")])
    assert room.sent == [
        {ONE: [Output(2, 0, (), "abort"), Output(1, 0, (10,))]},
        {ONE: [Output(1, 0, (20,), "length")]},
    ]
    assert len(room.desk.clients) == 0
