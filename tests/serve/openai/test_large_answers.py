# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers with many log probabilities do not hold the loop, however many come at once, whole or as a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.serve.openai.chat import start_chat
from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.completion_request import parse_completion
from metrale_ray.serve.openai.completions import start_completion
from tests.serve.openai.played import Played, read, settle
from tests.serve.openai.turns import turns_of

N = 16
SCORED = TokenLogprobs(2, -1.0, 2, (0, 2), (-0.5, -1.0))


async def started(played: Played, kind: str, body: dict[str, Any]) -> Any:
    call, given = played.call(), {"n": N, "max_tokens": 40, **body}
    if kind == "chat":
        return await start_chat(
            call, parse_chat({"messages": [{"role": "user", "content": "x"}], **given}, call.settings)
        )
    return await start_completion(call, parse_completion({"prompt": [2] * 50, **given}, call.settings))


async def turns(kind: str, body: dict[str, Any], *, streams: bool) -> int:
    """The turns of the loop while 40 tokens of each answer, which are there at once, are told."""
    played = Played(["a", "b", "c"])
    asked = await started(played, kind, {**body, "stream": streams})
    working = asyncio.ensure_future(turns_of(read(asked.chunks()) if streams else asked.whole()))
    await settle()
    params = asked.work.generation.requests[0].params
    for index in range(N):
        more: dict[str, Any] = {} if params.logprobs is None else {"logprobs": (SCORED,) * 40}
        if params.prompt_logprobs is not None and index == 0:
            more["prompt_logprobs"] = (SCORED,) * (len(asked.work.generation.requests[0].token_ids) - 1)
        played.head.say(0, index, *[2] * 40, finish_reason="length", **more)
    return (await working)[1]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", {"logprobs": True, "top_logprobs": 20}),
        ("completion", {"logprobs": 20}),
        ("completion", {"logprobs": 20, "echo": True}),
    ],
)
def test_the_loop_turns_while_log_probabilities_are_told(kind: str, body: dict[str, Any], streams: bool) -> None:
    plain = asyncio.run(turns(kind, {}, streams=streams))
    assert asyncio.run(turns(kind, body, streams=streams)) >= plain + N * 40 * 21 // 2700
