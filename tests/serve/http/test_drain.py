# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.drain import Drain
from tests.serve.http.asgi import JSON, Client, Exchange, app_of, ask, scope_of
from tests.serve.http.works import Held, answer_of


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def begin(held: Held, drain: Drain) -> tuple[asyncio.Task[None], Client, Exchange]:
    client, exchange = Client([]), Exchange()
    answer = answer_of(held, streams=True, drain=drain)
    return asyncio.create_task(answer(scope_of("POST", "/"), client.receive, exchange.send)), client, exchange


def test_an_idle_service_drains_at_once() -> None:
    drain = Drain()
    run(drain.run(60.0))
    assert drain.is_draining


def test_a_request_that_ends_in_time_is_whole_and_ends_the_wait() -> None:
    async def go() -> None:
        drain, held = Drain(), Held()
        task, _, exchange = begin(held, drain)
        await held.is_at["first"].wait()
        await drain.run(60.0)
        await task
        assert exchange.parts == [b"data: first\n\n", b"data: second\n\n"]

    run(go())


def test_what_does_not_end_in_time_is_told_and_nobody_runs_afterwards() -> None:
    async def go() -> None:
        drain, held = Drain(), [Held("second"), Held("end"), Held("start")]
        tasks = [begin(each, drain) for each in held]
        for each, place in zip(held, ("second", "end", "start"), strict=True):
            await each.is_at[place].wait()
        assert drain.num_running == 3
        await drain.run(0.01)
        assert drain.num_running == 0
        ends = await asyncio.gather(*(task for task, _, _ in tasks), return_exceptions=True)
        assert [getattr(end, "code", None) for end in ends] == [None, None, "shutting_down"]
        assert all(b"shutting_down" in exchange.parts[-1] and exchange.ended for _, _, exchange in tasks[:2])

    run(go())


def test_a_request_that_comes_during_the_end_is_turned_away_before_any_work() -> None:
    async def go() -> None:
        drain, held = Drain(), Held()
        drain.begin()
        task, _, exchange = begin(held, drain)
        with pytest.raises(ApiError) as caught:
            await task
        assert (caught.value.code, caught.value.status, held.reached) == ("draining", 503, [])
        assert (caught.value.retry_after_s, caught.value.headers) == (1, {"Connection": "close"})
        assert exchange.status is None

    run(go())


def test_routes_that_ask_an_engine_take_nobody_during_the_end_and_read_no_body() -> None:
    app = app_of()
    app.state.drain.begin()
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = ask(app, "POST", path, [JSON], b"not even JSON")
        assert (answer.status, answer.code, answer.header("retry-after")) == (503, "draining", "1")


def test_work_that_does_not_let_itself_be_ended_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("metrale_ray.serve.http.drain.LAST_WORDS_S", 0.01)

    async def go() -> None:
        drain, never, at = Drain(), asyncio.Event(), asyncio.Event()

        class Stubborn(Held):
            async def whole(self) -> dict[str, Any]:
                at.set()
                try:
                    await never.wait()
                except asyncio.CancelledError:
                    await never.wait()
                return {}

        answer = answer_of(Stubborn(), streams=False, drain=drain)
        task = asyncio.create_task(answer(scope_of("POST", "/"), Client([]).receive, Exchange().send))
        await at.wait()
        await drain.run(0.0)
        assert drain.num_running == 1
        never.set()
        await asyncio.gather(task, return_exceptions=True)

    run(go())
    assert "left behind" in caplog.text
