# SPDX-License-Identifier: MIT OR Apache-2.0
"""500 clients at once: what is accepted is answered right, the rest is told to come again, and a stream goes on."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fixtures.tiny import VOCAB_SIZE
from tests.serve.soak.replies import EventReader, whole_reply
from tests.serve.soak.side_stream import MAX_MODEL_LEN, SideStream
from tests.service_rig import MODEL_NAME, serving, write_model

NUM_CLIENTS = 500
CACHE_BYTES = 2**24  # twice what the side stream may take
TIMEOUT_S = 120.0
MAX_GAP_S = 5.0
"""Where nothing else runs it is about half a second: the same process reads, checks, sends and takes 500 requests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("succ")
    return write_model(folder, num_hidden_layers=1, max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(autouse=True)
def _room_for_sockets() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)) if hard > 0 else 8192, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def flood(url: str, num_tokens: int) -> Counter[str]:
    """All clients at once; what became of them. One that hangs fails the test."""
    seen: Counter[str] = Counter()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        seen.update(await asyncio.gather(*(ask(session, number, num_tokens) for number in range(NUM_CLIENTS))))
    return seen


async def ask(session: aiohttp.ClientSession, number: int, num_tokens: int) -> str:
    first, streams = number % VOCAB_SIZE, number % 2 == 0
    body = {"model": MODEL_NAME, "prompt": [first], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    async with session.post("/v1/completions", json={**body, "stream": streams, "return_token_ids": True}) as response:
        if response.status != 200:
            check_refusal(response, await response.json())
            return "refused"
        reader = EventReader()
        if streams:
            reader.push(await response.read())
            assert reader.is_done
        sequence = (reader.reply if streams else whole_reply(await response.json())).sequences[0]
    assert sequence.token_ids == [(first + place) % VOCAB_SIZE for place in range(1, num_tokens + 1)]
    assert sequence.finish_reason == "length"
    return "answered"


def check_refusal(response: aiohttp.ClientResponse, told: dict[str, Any]) -> None:
    assert response.status == 429, told
    assert int(response.headers["Retry-After"]) >= 1
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert (told["error"]["code"], told["error"]["type"]) == ("queue_full", "rate_limit_error")
    assert "max_queue_len" in told["error"]["message"]


@pytest.mark.parametrize(
    ("max_queue_len", "max_batch_size", "num_tokens", "some_are_refused"), [(16, 2, 24, True), (10_000, 16, 4, False)]
)
def test_500_clients_at_once_lose_nothing_that_was_accepted_and_hold_up_no_stream(
    model: Path, max_queue_len: int, max_batch_size: int, num_tokens: int, some_are_refused: bool
) -> None:
    """Where few may wait, one slot beside the stream's is far slower than the requests come."""
    engine = {"max_model_len": MAX_MODEL_LEN, "max_queue_len": max_queue_len, "max_batch_size": max_batch_size}
    with serving(model, kv_cache_memory=CACHE_BYTES, **engine) as rig:
        with SideStream(rig.url) as stream:
            seen = asyncio.run(flood(rig.url, num_tokens))
        rig.wait_idle()
        rig.live_probe()
    assert seen["answered"] + seen["refused"] == NUM_CLIENTS
    assert seen["answered"] >= 16
    assert (seen["refused"] > 0) == some_are_refused
    assert stream.largest_gap_s < MAX_GAP_S
