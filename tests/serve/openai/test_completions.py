# SPDX-License-Identifier: MIT OR Apache-2.0
"""Completions, whole and streamed, with an engine that a test plays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front.messages import Abort
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.openai.completion_request import parse_completion
from metrale_ray.serve.openai.completions import StartedCompletion, start_completion
from tests.serve.openai.played import Played, documents, read, settle

PIECES = ["a", "b", "c", "d", "\ufffd"]


def scored(token_id: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 2, (0, token_id), (-0.5, logprob))


async def start(played: Played, **body: Any) -> StartedCompletion:
    call = played.call()
    return await start_completion(call, parse_completion({"prompt": "x", "max_tokens": 9, **body}, call.settings))


def played_model() -> Played:
    return Played(PIECES)


def test_a_whole_answer_has_openais_shape() -> None:
    async def script() -> None:
        played = played_model()
        whole = asyncio.ensure_future((await start(played)).whole())
        await settle()
        played.head.say(0, 0, 1, 2)
        played.head.say(0, 0, 3, finish_reason="length")
        answer = await whole
        assert answer.pop("id").startswith("cmpl-")
        assert isinstance(answer.pop("created"), int)
        assert answer == {
            "object": "text_completion",
            "model": "played",
            "system_fingerprint": None,
            "choices": [
                {"index": 0, "text": "bcd", "logprobs": None, "finish_reason": "length", "stop_reason": None},
            ],
            "usage": {
                "prompt_tokens": 1,
                "completion_tokens": 3,
                "total_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
        }
        assert (played.meter.prompts, played.meter.num_tokens, played.meter.reasons) == ([1], 3, ["length"])

    asyncio.run(script())


def test_what_is_there_at_once_is_one_piece_of_the_stream_and_it_ends_with_usage_and_done() -> None:
    async def script() -> None:
        played = played_model()
        options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "stop": "cd"}
        chunks = (await start(played, **options)).chunks()
        first = asyncio.ensure_future(anext(chunks))
        await settle()
        assert not first.done()
        played.head.say(0, 0, 0)
        played.head.say(0, 1, 1)
        told = documents(await first)
        assert [(c["choices"][0]["index"], c["choices"][0]["text"], c["usage"]) for c in told] == [
            (0, "a", None),
            (1, "b", None),
        ]
        assert all(c["choices"][0]["finish_reason"] is None for c in told)
        played.head.say(0, 1, 2)  # may become a stop string: nothing to show
        played.head.say(0, 0, 3, finish_reason="length")
        (last_of_first,) = documents(await anext(chunks))
        assert last_of_first["choices"] == [
            {"index": 0, "text": "d", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ]
        played.head.say(0, 1, 3)
        rest = await read(chunks)
        assert rest[0]["choices"][0] == {
            "index": 1,
            "text": "",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "cd",
        }
        assert rest[1]["choices"] == []
        assert rest[1]["usage"]["completion_tokens"] == 5
        assert rest[2:] == ["[DONE]"]
        assert {c["id"] for c in [*told, *rest[:2]]} == {told[0]["id"]}

    asyncio.run(script())


def test_without_include_usage_no_chunk_speaks_of_it_and_with_continuous_usage_each_does() -> None:
    async def script(options: dict[str, Any] | None) -> list[Any]:
        played = played_model()
        more = {} if options is None else {"stream_options": options}
        reading = asyncio.ensure_future(read((await start(played, stream=True, **more)).chunks()))
        await settle()
        played.head.say(0, 0, 0, 1)
        await settle()
        played.head.say(0, 0, 2, finish_reason="length")
        return await reading

    *plain, done = asyncio.run(script(None))
    assert done == "[DONE]"
    assert len(plain) == 2
    assert all("usage" not in chunk for chunk in plain)
    *told, _ = asyncio.run(script({"include_usage": True, "continuous_usage_stats": True}))
    assert [chunk["usage"]["completion_tokens"] for chunk in told] == [2, 3, 3]


def test_log_probabilities_have_a_place_in_the_text_and_candidates_of_one_text_are_told_apart() -> None:
    async def script() -> None:
        played = Played([*PIECES, "a"])
        whole = asyncio.ensure_future((await start(played, logprobs=2)).whole())
        await settle()
        same = TokenLogprobs(5, -1.0, 2, (0, 5), (-0.5, -1.0))
        played.head.say(0, 0, 5, 2, logprobs=(same, scored(2)), finish_reason="length")
        (choice,) = (await whole)["choices"]
        assert choice["logprobs"] == {
            "tokens": ["a", "c"],
            "token_logprobs": [-1.0, -1.0],
            "top_logprobs": [{"a": -0.5, "token_id:5": -1.0}, {"a": -0.5, "c": -1.0}],
            "text_offset": [0, 1],
        }

    asyncio.run(script())


@pytest.mark.parametrize("streams", [False, True])
def test_echo_gives_the_prompt_and_its_log_probabilities_before_each_answer(streams: bool) -> None:
    async def script() -> None:
        played = played_model()
        body = {"prompt": [1, 2], "echo": True, "logprobs": 1, "n": 2, "stream": streams, "return_token_ids": True}
        started = await start(played, **body)
        work: Any = read(started.chunks()) if streams else started.whole()
        working = asyncio.ensure_future(work)
        await settle()
        for index in (1, 0):
            told = {"prompt_logprobs": (scored(2),)} if index == 0 else {}
            played.head.say(0, index, 3, logprobs=(scored(3),), finish_reason="length", **told)
        answer = await working
        choices = [chunk["choices"][0] for chunk in answer[:-1]] if streams else answer["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        for choice in choices:
            assert choice["text"] == "bcd"
            assert choice["logprobs"] == {
                "tokens": ["b", "c", "d"],
                "token_logprobs": [None, -1.0, -1.0],
                "top_logprobs": [None, {"a": -0.5, "c": -1.0}, {"a": -0.5, "d": -1.0}],
                "text_offset": [0, 1, 2],
            }
            assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], [3])

    asyncio.run(script())


def test_max_tokens_0_asks_about_the_prompt_alone() -> None:
    async def script() -> None:
        played = played_model()
        body = {"prompt": [1, 2], "echo": True, "logprobs": 0, "max_tokens": 0, "prompt_logprobs": 1}
        whole = asyncio.ensure_future((await start(played, **body)).whole())
        await settle()
        played.head.say(0, 0, 3, logprobs=(scored(3),), prompt_logprobs=(scored(2),), finish_reason="stop")
        answer = await whole
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("bc", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
        assert choice["prompt_logprobs"] == [
            None,
            {
                "2": {"logprob": -1.0, "rank": 2, "decoded_token": "c"},
                "0": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            },
        ]
        assert answer["usage"]["completion_tokens"] == 0

    asyncio.run(script())


def test_best_of_gives_the_likeliest_per_token() -> None:
    async def script() -> None:
        played = played_model()
        whole = asyncio.ensure_future((await start(played, n=2, best_of=3)).whole())
        await settle()
        for index, logprob in enumerate((-3.0, -1.0, -2.0)):
            played.head.say(0, index, index, logprobs=(scored(index, logprob),), finish_reason="length")
        answer = await whole
        assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [(0, "b", None), (1, "c", None)]
        assert answer["usage"]["completion_tokens"] == 3

    asyncio.run(script())


def test_several_prompts_have_their_answers_at_their_places_in_one_stream() -> None:
    async def script() -> None:
        played = played_model()
        started = await start(played, prompt=[[1], [2], [3]], n=2, stream=True)
        reading = asyncio.ensure_future(read(started.chunks()))
        await settle()
        for number in (2, 0, 1):
            for index in (1, 0):
                played.head.say(number, index, number + 1, finish_reason="length")
        *told, done = await reading
        found = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in told}
        assert (found, done) == ({0: "b", 1: "b", 2: "c", 3: "c", 4: "d", 5: "d"}, "[DONE]")

    asyncio.run(script())


@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal_of_the_head_is_an_error_and_no_stream(streams: bool) -> None:
    async def script() -> None:
        played = played_model()
        started = await start(played, n=2, stream=streams)
        work: Any = anext(started.chunks()) if streams else started.whole()
        working = asyncio.ensure_future(work)
        await settle()
        played.head.say(0, 0, finish_reason="error", error=("queue_full", "try later"), is_refusal=True)
        with pytest.raises(ApiError, match="try later") as caught:
            await working
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 1)
        assert sorted(played.meter.reasons) == ["error", "error"]

    asyncio.run(script())


@pytest.mark.parametrize(
    ("code", "status", "param"), [("grammar_failed", 400, "guided_regex"), ("bad_logits", 500, None)]
)
def test_a_form_that_fails_while_it_is_written_is_the_callers_mistake(
    code: str, status: int, param: str | None
) -> None:
    async def script() -> None:
        played = played_model()
        working = asyncio.ensure_future((await start(played, guided_regex="a")).whole())
        await settle()
        played.head.say(0, 0, finish_reason="error", error=(code, "it cannot go on"))
        with pytest.raises(ApiError) as caught:
            await working
        assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, param)

    asyncio.run(script())


def test_a_failure_after_the_start_is_raised_behind_what_came() -> None:
    async def script() -> None:
        played = played_model()
        chunks = (await start(played, n=2, stream=True)).chunks()
        first = asyncio.ensure_future(anext(chunks))
        await settle()
        played.head.say(0, 0, 0)
        await first
        played.head.say(0, 1, 1, finish_reason="error", error=("command_failed", "an expert broke"))
        (told,) = documents(await anext(chunks))
        assert told["choices"][0]["text"] == "b"
        assert told["choices"][0]["finish_reason"] is None
        with pytest.raises(ApiError, match="an expert broke") as caught:
            await anext(chunks)
        assert (caught.value.status, caught.value.code) == (500, "command_failed")
        assert played.head.said == [Abort(0)]
        assert sorted(played.meter.reasons) == ["abort", "error"]

    asyncio.run(script())


@pytest.mark.parametrize("streams", [False, True])
def test_leaving_aborts_every_prompt(streams: bool) -> None:
    async def script() -> None:
        played = played_model()
        started = await start(played, prompt=[[1], [2]], n=2, stream=streams)
        chunks = started.chunks()
        work: Any = anext(chunks) if streams else started.whole()
        working = asyncio.ensure_future(work)
        await settle()
        if streams:
            played.head.say(0, 0, 0)
            await working
            await chunks.aclose()
        else:
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
        assert set(played.head.said) == {Abort(0), Abort(1)}
        assert played.meter.reasons == ["abort"] * 4

    asyncio.run(script())


def test_the_death_of_the_engine_is_told_with_its_reason() -> None:
    async def script() -> None:
        played = played_model()
        played.backend.reason = EngineDead("rank 1 ran out of memory", rank=1)
        whole = asyncio.ensure_future((await start(played)).whole())
        await settle()
        played.head.handles[0].die(EngineDead("the head has gone", rank=0))
        with pytest.raises(ApiError, match="rank 1 ran out of memory") as caught:
            await whole
        assert (caught.value.status, caught.value.code) == (503, "engine_dead")
        assert played.meter.reasons == ["abort"]

    asyncio.run(script())


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": ""}, "empty_prompt", "prompt"),
        ({"prompt": ["a", ""]}, "empty_prompt", "prompt"),
        ({"prompt": [50]}, "invalid_request", "prompt"),
        ({"prompt": [[1], [1] * 100]}, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 30_000}, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 30_000, "add_special_tokens": False}, "context_length_exceeded", "prompt"),
        ({"stop_token_ids": [50]}, "invalid_request", "stop_token_ids"),
        ({"logit_bias": {"50": 1}}, "invalid_request", "logit_bias"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_sent(body: dict[str, Any], code: str, param: str) -> None:
    played = played_model()
    with pytest.raises(ApiError) as caught:
        asyncio.run(start(played, **body))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)
    assert played.head.submitted == []
