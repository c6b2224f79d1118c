# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.drain import Drain
from metrale_ray.serve.http.visit import visit_of
from tests.serve.http.asgi import Client, Exchange, scope_of
from tests.serve.http.works import Held, answer_of

PLACES = [("start", False), ("whole", False), ("start", True), ("first", True), ("second", True), ("end", True)]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def answered(answer: Any, client: Client | None = None) -> Exchange:
    exchange = Exchange()
    await answer(scope_of("POST", "/"), (client or Client([])).receive, exchange.send)
    return exchange


class Later:
    """The running loop's clock, which a test sets forward."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._time, self._ahead_s = self._loop.time, 0.0
        self._loop.time = lambda: self._time() + self._ahead_s  # type: ignore[method-assign]

    def forward(self, seconds: float) -> None:
        self._ahead_s += seconds


def events(exchange: Exchange) -> list[Any]:
    lines = exchange.body.decode().split("\n\n")
    assert lines.pop() == ""
    return [line.removeprefix("data: ") for line in lines]


def error_code(event: str) -> str:
    return str(json.loads(event)["error"]["code"])


def test_a_whole_answer_has_its_length_and_headers() -> None:
    exchange = run(answered_by(Held(), streams=False))
    assert (exchange.status, exchange.json, exchange.ended) == (200, {"answer": 1}, True)
    assert exchange.header("content-length") == str(len(exchange.body))
    assert (exchange.header("x-own"), exchange.header("content-type")) == ("1", "application/json")


def test_a_stream_sends_each_chunk_as_it_comes_and_has_no_length() -> None:
    exchange = run(answered_by(Held(), streams=True))
    assert exchange.parts == [b"data: first\n\n", b"data: second\n\n"]
    assert exchange.ended
    assert exchange.header("content-length") is None
    assert str(exchange.header("content-type")).startswith("text/event-stream")
    assert exchange.header("cache-control") == "no-cache"


async def answered_by(held: Held, **how: Any) -> Exchange:
    return await answered(answer_of(held, **how))


@pytest.mark.parametrize(("place", "streams"), PLACES[:4])
def test_what_fails_before_there_is_anything_is_raised_and_nothing_is_sent(place: str, streams: bool) -> None:
    refusal = ApiError(429, "full", code="queue_full")

    async def go() -> None:
        exchange = Exchange()
        answer = answer_of(Held(error=refusal, fails_at=place), streams=streams)
        with pytest.raises(ApiError) as caught:
            await answer(scope_of("POST", "/"), Client([]).receive, exchange.send)
        assert caught.value is refusal
        assert exchange.status is None

    run(go())


@pytest.mark.parametrize("place", ["second", "end"])
@pytest.mark.parametrize(
    ("error", "code"), [(ApiError(500, "no", code="command_failed"), "command_failed"), (KeyError(), "internal_error")]
)
def test_what_fails_within_a_stream_is_an_event_and_the_end(place: str, error: Exception, code: str) -> None:
    scope, exchange = scope_of("POST", "/"), Exchange()
    run(answer_of(Held(error=error, fails_at=place), streams=True)(scope, Client([]).receive, exchange.send))
    *before, last = events(exchange)
    assert before == ["first", "second"][: 1 if place == "second" else 2]
    assert error_code(last) == code
    assert exchange.ended
    assert visit_of(scope).error_code == code  # for its line in the log, and the figures


@pytest.mark.parametrize(("place", "streams"), PLACES)
def test_a_client_that_leaves_cancels_the_work_wherever_it_is(place: str, streams: bool) -> None:
    async def go() -> None:
        held, client, drain = Held(place), Client([]), Drain()
        exchange = Exchange()
        answer = answer_of(held, streams=streams, drain=drain)
        task = asyncio.create_task(answer(scope_of("POST", "/"), client.receive, exchange.send))
        await held.is_at[place].wait()
        assert drain.num_running == 1
        client.left.set()
        if exchange.status is None:
            with pytest.raises(ApiError) as caught:
                await task
            assert caught.value.code == "client_gone"
        else:
            await task
        assert (held.cancelled, drain.num_running, exchange.ended) == ([place], 0, False)

    run(go())


@pytest.mark.parametrize(("place", "streams"), PLACES)
@pytest.mark.parametrize("why", ["deadline_exceeded", "shutting_down"])
def test_the_limit_of_time_and_the_end_of_the_service_are_told(place: str, streams: bool, why: str) -> None:
    async def go() -> None:
        held, drain, exchange, clock = Held(place), Drain(), Exchange(), Later()
        answer = answer_of(held, streams=streams, drain=drain, max_request_s=1000.0)
        task = asyncio.create_task(answer(scope_of("POST", "/"), Client([]).receive, exchange.send))
        await held.is_at[place].wait()
        if why == "shutting_down":
            drain.end_all()
        else:
            clock.forward(1000.0)
        if place in ("second", "end"):
            await task
            assert error_code(events(exchange)[-1]) == why
            assert exchange.ended
        else:
            with pytest.raises(ApiError) as caught:
                await task
            assert (caught.value.code, caught.value.status) == (why, 504 if why == "deadline_exceeded" else 503)
            assert exchange.status is None
        assert (held.cancelled, drain.num_running) == ([place], 0)

    run(go())


def test_a_cancellation_from_outside_stays_one_and_cancels_the_work() -> None:
    async def go() -> None:
        held, drain = Held("second"), Drain()
        task = asyncio.create_task(answered(answer_of(held, streams=True, drain=drain)))
        await held.is_at["second"].wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (held.cancelled, drain.num_running) == (["second"], 0)

    run(go())


def test_a_client_that_left_before_the_work_began_has_nothing_done() -> None:
    async def go() -> None:
        held, client = Held("start"), Client([])
        client.left.set()
        with pytest.raises(ApiError, match="closed the connection"):
            await answered(answer_of(held, streams=True), client)

    run(go())


def test_a_client_that_does_not_read_is_left_alone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metrale_ray.serve.http.answer.LAST_WORDS_S", 0.01)

    async def go() -> None:
        held, exchange, clock = Held("second"), Exchange(), Later()

        async def send(message: Any) -> None:
            if b"error" in message.get("body", b""):
                await asyncio.Event().wait()
            await exchange.send(message)

        answer = answer_of(held, streams=True, max_request_s=1000.0)
        task = asyncio.create_task(answer(scope_of("POST", "/"), Client([]).receive, send))
        await held.is_at["second"].wait()
        clock.forward(1000.0)
        await task
        assert (events(exchange), exchange.ended) == (["first"], False)

    run(go())
