# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a front asks of the head, and what its user gets, with a head that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient, Opened, Output, RequestHandle
from metrale_ray.protocol.front.messages import Abort, Finish
from metrale_ray.protocol.front.params_map import PackedParams
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from metrale_ray.serve.outputs import Logprob, RequestOutput
from metrale_ray.serve.stop_strings import StopAutomaton
from tests.serve.pieces import piece_tokenizer

PIECES = ["a", "b", "c", "d"]


class PlayedHead:
    """Stands in for a client: keeps what is submitted, and what the handles say to the head."""

    def __init__(self) -> None:
        self.handles: list[RequestHandle] = []
        self.submitted: list[tuple[tuple[int, ...], PackedParams, int, float | None]] = []
        self.said: list[Abort | Finish] = []

    def wait_opened(self, timeout_s: float) -> Opened:
        return Opened(100, 50, 1)

    def submit(
        self, token_ids: Sequence[int], params: PackedParams, *, priority: int, timeout_s: float | None
    ) -> RequestHandle:
        self.submitted.append((tuple(token_ids), params, priority, timeout_s))
        self.handles.append(RequestHandle(len(self.handles), self.said.append, params.params.n))
        return self.handles[-1]

    def say(self, number: int, index: int, *token_ids: int, **more: Any) -> None:
        self.handles[number].put(Output(number, index, token_ids, **more))


def make_front(max_waiting: int = 10) -> tuple[PlayedHead, Front]:
    head = PlayedHead()
    return head, Front(cast(FrontClient, head), piece_tokenizer(PIECES), max_waiting=max_waiting)


async def settle() -> None:
    """Let every task run until it waits for something that has not come."""
    for _ in range(20):
        await asyncio.sleep(0)


async def collect(items: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [item async for item in items]


def test_one_step_of_several_sequences_makes_one_item() -> None:
    async def script() -> None:
        head, front = make_front()
        (request,) = front.prepare.requests([3], SamplingParams(n=2), priority=-5, timeout_s=2)
        stream = front.stream(request)
        first = asyncio.ensure_future(anext(stream))
        await settle()
        assert head.submitted == [((3,), request.sent, -5, 2.0)]
        head.say(0, 0, 0)
        head.say(0, 1, 1)
        assert [(o.text, o.delta) for o in (await first).outputs] == [("a", "a"), ("b", "b")]
        head.say(0, 1, 2)
        assert [(o.text, o.delta) for o in (await anext(stream)).outputs] == [("a", ""), ("bc", "c")]
        head.say(0, 0, 1, finish_reason="length")
        head.say(0, 1, 3, finish_reason="length")
        last = await anext(stream)
        assert (last.finished, [o.text for o in last.outputs]) == (True, ["ab", "bcd"])
        assert await collect(stream) == []
        assert head.said == []

    asyncio.run(script())


def test_a_stop_string_ends_its_sequence_at_the_head_and_the_others_go_on() -> None:
    async def script() -> None:
        head, front = make_front()
        (request,) = front.prepare.requests([3], SamplingParams(n=2, stop="bc"))
        reading = asyncio.ensure_future(collect(front.stream(request)))
        await settle()
        head.say(0, 1, 1)
        head.say(0, 1, 2)
        await settle()
        assert head.said == [Finish(0, 1)]
        head.say(0, 1, 3)  # it was on its way
        head.say(0, 1, finish_reason="stop")
        head.say(0, 0, 0, finish_reason="length")
        last = (await reading)[-1]
        assert [(o.text, o.finish_reason, o.stop_reason) for o in last.outputs] == [
            ("a", "length", None),
            ("", "stop", "bc"),
        ]
        assert head.said == [Finish(0, 1)]

    asyncio.run(script())


def test_the_search_for_stop_strings_is_prepared_once_for_all_sequences_of_all_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Sequence[str]] = []
    make = StopAutomaton.__init__

    def counted(self: StopAutomaton, stop: Sequence[str] = ()) -> None:
        made.append(stop)
        make(self, stop)

    monkeypatch.setattr(StopAutomaton, "__init__", counted)

    async def script() -> None:
        head, front = make_front(max_waiting=100)
        requests = front.prepare.requests([[0], [1], [2]], SamplingParams(n=4, stop=["bc", "d"]))
        assert made == [("bc", "d")]
        reading = asyncio.ensure_future(collect(front.all(requests)))
        await settle()
        for number in range(3):
            for index in range(4):
                head.say(number, index, *(1,) * index, 2, 3, finish_reason="stop")
        found = [[(o.text, o.stop_reason) for o in answer.outputs] for answer in await reading]
        assert found == [[("c", "d"), ("", "bc"), ("b", "bc"), ("bb", "bc")]] * 3
        assert made == [("bc", "d")]

    asyncio.run(script())


def test_leaving_a_stream_aborts_the_request_once() -> None:
    async def script() -> None:
        head, front = make_front()
        (request,) = front.prepare.requests([3])
        stream = front.stream(request)
        first = asyncio.ensure_future(anext(stream))
        await settle()
        head.say(0, 0, 0)
        await first
        await stream.aclose()
        assert head.said == [Abort(0)]

    asyncio.run(script())


def test_what_arrived_before_the_engine_died_is_given_before_the_death_is_told() -> None:
    async def script() -> None:
        head, front = make_front()
        (request,) = front.prepare.requests([3])
        stream = front.stream(request)
        first = asyncio.ensure_future(anext(stream))
        await settle()
        head.say(0, 0, 0)
        head.handles[0].die(EngineDead("rank 1 has gone", rank=1))
        assert (await first).outputs[0].text == "a"
        with pytest.raises(EngineDead, match="rank 1 has gone"):
            await anext(stream)

    asyncio.run(script())


def test_a_prompt_that_is_too_long_is_answered_without_the_head() -> None:
    async def script() -> None:
        head, front = make_front()
        (request,) = front.prepare.requests([1] * 100, SamplingParams(n=2))
        (item,) = await collect(front.stream(request))
        assert item.finished
        assert [o.error_code for o in item.outputs] == ["context_length_exceeded"] * 2
        assert head.submitted == []

    asyncio.run(script())


def test_a_part_of_the_prompts_log_probabilities_alone_is_no_item() -> None:
    async def script() -> None:
        head, front = make_front()
        (request,) = front.prepare.requests([3], SamplingParams(prompt_logprobs=0))
        first = asyncio.ensure_future(anext(front.stream(request)))
        await settle()
        head.say(0, 0)
        await settle()
        assert not first.done()
        head.say(0, 0, 0)
        assert (await first).prompt_logprobs == [None]

    asyncio.run(script())


def test_answers_come_in_order_each_as_soon_as_all_before_it_are_there() -> None:
    async def script() -> None:
        head, front = make_front()
        done: list[int] = []
        answers = front.all(front.prepare.requests([[0], [1], [2]]), lambda: done.append(1))
        first = asyncio.ensure_future(anext(answers))
        await settle()
        head.say(1, 0, 1, finish_reason="length")
        await settle()
        assert (len(done), first.done()) == (1, False)
        head.say(0, 0, 0, finish_reason="length")
        assert (await first).prompt_token_ids == [0]
        assert (await anext(answers)).prompt_token_ids == [1]
        head.say(2, 0, 2, finish_reason="length")
        assert [item.prompt_token_ids for item in await collect(answers)] == [[2]]
        assert len(done) == 3

    asyncio.run(script())


def test_requests_are_sent_in_order_of_priority_and_no_more_sequences_than_there_is_room_for() -> None:
    async def script() -> None:
        head, front = make_front(max_waiting=3)
        params = [SamplingParams(n=n) for n in (2, 2, 64, 1)]
        requests = front.prepare.requests([[0], [1], [2], [3]], params, priority=[0, 0, 5, -1])
        reading = asyncio.ensure_future(collect(front.all(requests)))
        sent: list[list[int]] = []
        for number, count in enumerate((1, 2, 2, 64)):
            await settle()
            sent.append([token_ids[0] for token_ids, *_ in head.submitted])
            for index in range(count):
                head.say(number, index, 0, finish_reason="length")
            await settle()
        assert sent == [[3, 0], [3, 0], [3, 0, 1], [3, 0, 1, 2]]
        assert [item.prompt_token_ids for item in await reading] == [[0], [1], [2], [3]]

    asyncio.run(script())


def test_leaving_many_answers_aborts_what_runs_and_sends_no_more() -> None:
    async def script() -> None:
        head, front = make_front(max_waiting=2)
        answers = front.all(front.prepare.requests([[0], [1], [2]]))
        first = asyncio.ensure_future(anext(answers))
        await settle()
        head.say(0, 0, 0, finish_reason="length")
        await first
        await settle()
        await answers.aclose()
        assert head.said == [Abort(1), Abort(2)]
        assert len(head.submitted) == 3

    asyncio.run(script())


def test_deltas_hold_what_is_new_alone_and_of_sequences_with_news_alone() -> None:
    async def script() -> None:
        head, front = make_front()
        (request,) = front.prepare.requests([3, 3], SamplingParams(n=2, stop="bc", prompt_logprobs=0))
        deltas = front.deltas(request)
        first = asyncio.ensure_future(anext(deltas))
        await settle()
        head.say(0, 1, 0)
        await settle()
        assert not first.done()  # what the prompt scored comes with the first tokens
        head.say(0, 0, 0, prompt_logprobs=(TokenLogprobs(3, -1.0, 1),))
        one = await first
        assert [(s.index, s.texts, s.token_ids) for s in one.sequences] == [(0, ["a"], [0]), (1, ["a"], [0])]
        assert one.prompt_logprobs == [None, {3: Logprob(-1.0, 1, "d")}]
        head.say(0, 1, 1)
        two = await anext(deltas)
        assert (two.prompt_logprobs, [(s.index, s.texts) for s in two.sequences]) == (None, [(1, [""])])
        head.say(0, 1, 2, 3)
        three = await anext(deltas)
        assert [(s.token_ids, s.finish_reason, s.stop_reason) for s in three.sequences] == [([2], "stop", "bc")]
        assert head.said == [Finish(0, 1)]
        head.say(0, 1, 3)  # it was on its way: no item
        head.say(0, 0, 3, finish_reason="length")
        four = await anext(deltas)
        assert (four.finished, [(s.index, s.text) for s in four.sequences]) == (True, [(0, "d")])
        assert [delta async for delta in deltas] == []

    asyncio.run(script())


def test_the_deltas_of_several_prompts_come_together_and_no_more_run_than_there_is_room_for() -> None:
    async def script() -> None:
        head, front = make_front(max_waiting=2)
        deltas = front.deltas_of_all(front.prepare.requests([[0], [1], [2]]))
        first = asyncio.ensure_future(anext(deltas))
        await settle()
        assert [token_ids for token_ids, *_ in head.submitted] == [(0,), (1,)]
        head.say(0, 0, 0, finish_reason="length")
        head.say(1, 0, 1)
        assert [(number, delta.sequences[0].text) for number, delta in await first] == [(0, "a"), (1, "b")]
        second = asyncio.ensure_future(anext(deltas))
        await settle()
        assert [token_ids for token_ids, *_ in head.submitted] == [(0,), (1,), (2,)]
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert set(head.said) == {Abort(1), Abort(2)}

    asyncio.run(script())
