# SPDX-License-Identifier: MIT OR Apache-2.0
"""Failures that a server's state makes, as the Python client sees them: each is the exception that it has for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest

from tests.conformance.target import Target
from tests.service_rig import MODEL_NAME, ServiceRig, serving, write_model
from tests.test_head import until

MESSAGES: Any = [{"role": "user", "content": "one"}]
LONG: Any = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
REASON = "the engine is away"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceRig]:
    """A service with one slot and one place to wait."""
    model = write_model(tmp_path_factory.mktemp("failures"))
    with serving(model, max_batch_size=1, max_queue_len=1) as rig:
        yield rig


@pytest.fixture
def target(rig: ServiceRig) -> Iterator[Target]:
    """The service, which is as it was when the test is over."""
    with closing(Target(rig.url, MODEL_NAME)) as target:
        yield target
    rig.wait_idle()
    rig.live_probe()


async def end_all(rig: ServiceRig) -> None:
    rig.drain.end_all()


def test_a_full_queue_is_a_rate_limit_error_that_says_when_to_ask_again(rig: ServiceRig, target: Target) -> None:
    async def fill() -> openai.RateLimitError:
        async with target.async_client() as client:
            running = await client.chat.completions.create(stream=True, **LONG)
            waiting = asyncio.ensure_future(client.chat.completions.create(stream=True, **LONG))
            await asyncio.to_thread(until, lambda: rig.stats()["waiting"] == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**LONG)
            waiting.cancel()
            await asyncio.wait([waiting])
            await running.close()
        return caught.value

    error = asyncio.run(fill())
    assert error.code == "queue_full"
    assert int(error.response.headers["retry-after"]) >= 1


def test_an_engine_that_is_away_is_an_internal_server_error_of_status_503(rig: ServiceRig, target: Target) -> None:
    rig.backend.reason = REASON
    try:
        with target.client() as client, pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
    finally:
        rig.backend.reason = ""
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_unavailable"
    assert REASON in caught.value.message
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_failure_in_a_stream_is_an_api_error_with_its_code(rig: ServiceRig, target: Target) -> None:
    with target.client() as client:
        chunks = iter(client.chat.completions.create(stream=True, **LONG))
        assert next(chunks).choices[0].delta.role == "assistant"
        rig.server.call(end_all(rig))
        with pytest.raises(openai.APIError) as caught:
            list(chunks)
    assert caught.value.code == "shutting_down"
    assert "shuts down" in caught.value.message


def test_a_failure_of_a_whole_answer_is_a_status(rig: ServiceRig, target: Target) -> None:
    async def ask() -> openai.InternalServerError:
        async with target.async_client() as client:
            asked = asyncio.ensure_future(client.chat.completions.create(**LONG))
            await asyncio.to_thread(until, lambda: rig.stats()["running"] == 1)
            await asyncio.to_thread(rig.server.call, end_all(rig))
            with pytest.raises(openai.InternalServerError) as caught:
                await asked
        return caught.value

    error = asyncio.run(ask())
    assert (error.status_code, error.code) == (503, "shutting_down")


def test_a_client_that_waits_no_longer_has_a_timeout_error_and_its_work_ends(rig: ServiceRig, target: Target) -> None:
    with target.client() as client:
        impatient = client.with_options(timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(**LONG)
    rig.wait_idle()


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    nobody = "http://127.0.0.1:1"  # a port that no program of a user may have
    with closing(Target(nobody, MODEL_NAME)) as target, target.client() as client:
        with pytest.raises(openai.APIConnectionError) as caught:
            client.models.list()
        assert not isinstance(caught.value, openai.APITimeoutError)
