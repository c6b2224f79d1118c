# SPDX-License-Identifier: MIT OR Apache-2.0
"""Very much at once from one front: its session goes on, its other request too, and steps run meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from metrale_ray import desk
from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import RequestHandle
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from tests.fixtures.succ import write_succ
from tests.test_head import GREEDY, LONG, TIMEOUT_S, end_of, running, tokens_of, until
from tests.test_head_requests import assert_nothing_left, chain

MANY = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_succ(tmp_path_factory.mktemp("succ"))


def some_more(handle: RequestHandle, count: int = 20) -> None:
    """The request goes on."""
    for _ in range(count):
        assert handle.get(TIMEOUT_S).finish_reason is None


def test_a_thousand_aborts_at_once_leave_the_other_request_running(model: Path) -> None:
    with running(model, ep_size=1) as (process, client):
        long = client.submit([5], LONG)
        some_more(long)
        handles = [client.submit([1], LONG, priority=1) for _ in range(MANY)]
        until(lambda: process.call(process.head.stats())["waiting"] > MANY // 2)
        for handle in handles:
            handle.abort()
        assert {end_of(handle) for handle in handles} == {"abort"}
        some_more(long)
        assert client.death is None
        long.abort()
        assert_nothing_left(process, client)


def test_a_thousand_refusals_at_once_leave_the_other_request_running(model: Path) -> None:
    with running(model, ep_size=1, max_queue_len=8) as (process, client):
        long = client.submit([5], LONG)
        some_more(long)
        handles = [client.submit([1], GREEDY) for _ in range(MANY)]
        handles += [client.submit([1] * 4001, GREEDY) for _ in range(MANY)]
        codes = {(output.error or ("",))[0] for output in (handle.get(TIMEOUT_S) for handle in handles[-MANY:])}
        assert codes == {"context_length_exceeded"}
        ends = [end_of(handle) for handle in handles[:MANY]]
        assert set(ends) <= {"error", "length"}
        assert ends.count("error") > MANY // 2
        some_more(long)
        long.abort()
        assert_nothing_left(process, client)


def test_a_call_over_a_thousand_prompts_that_is_closed_early_leaves_the_other_request_running(model: Path) -> None:
    with running(model, ep_size=1) as (process, client):
        front = Front(client, None, max_waiting=5 * MANY)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        requests = front.prepare.requests([[1 + n % 300] for n in range(MANY)], params)
        long = client.submit([5], LONG)

        async def first_alone() -> tuple[int, ...]:
            answers = front.all(requests)
            first = await anext(answers)
            await answers.aclose()
            return tuple(first.outputs[0].token_ids)

        assert asyncio.run(first_alone()) == tuple(chain(1, 20))
        some_more(long)
        assert client.death is None
        long.abort()
        assert_nothing_left(process, client)


def test_steps_run_while_requests_arrive(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound at one request per step, a thousand that arrive together take a thousand steps to be heard."""
    monkeypatch.setattr(desk, "MAX_REQUESTS", 1)
    with running(model, ep_size=1) as (process, client):
        long = client.submit([5], LONG)
        some_more(long)
        handles = [client.submit([1], LONG, priority=1) for _ in range(MANY)]
        until(lambda: process.call(process.head.stats())["waiting"] > 5)
        before = process.call(process.head.stats())
        until(lambda: process.call(process.head.stats())["waiting"] > before["waiting"] + 50)
        after = process.call(process.head.stats())
        assert after["steps"] - before["steps"] >= after["waiting"] - before["waiting"] - 1
        for handle in handles:  # and what is not heard of yet ends without the engine
            handle.abort()
        assert {end_of(handle) for handle in handles} == {"abort"}
        long.abort()
        assert_nothing_left(process, client)


def test_a_failing_server_of_the_fronts_ends_the_engine_with_the_reason(model: Path) -> None:
    with running(model, ep_size=2) as (process, client):
        handle = client.submit([5], LONG)
        some_more(handle)

        def fail(front: object, message: object) -> None:
            raise ZeroDivisionError("a fault of the head's own")

        process.head._fronts._on_message = fail
        client.submit([6], GREEDY)
        failure = process.wait_ended()
        assert isinstance(failure, EngineDead)
        assert "the server of the fronts failed: a fault of the head's own" in failure.message
        with pytest.raises(EngineDead, match="the front server failed: a fault of the head's own"):
            tokens_of(handle)
        assert process.head.state.phase == "ended"
