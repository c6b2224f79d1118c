# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chats and completions over real sockets, with an engine of two ranks: each case, and then a normal request."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic_core import to_json

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient
from metrale_ray.serve.backend import GenerationDefaults, Health, ServedModel
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.front import Front
from metrale_ray.serve.openai.call import ApiSettings, Call
from metrale_ray.serve.openai.chat import StartedChat, start_chat
from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.completion_request import parse_completion
from metrale_ray.serve.openai.completions import StartedCompletion, start_completion
from metrale_ray.serve.text import Tokenizer
from tests.fixtures.succ import write_succ
from tests.serve.openai.played import PlayedTemplate, TextPieces, read
from tests.serve.test_front_with_engine import END, PIECES, TEXT
from tests.test_head import Process, running, until

MODEL_LEN = 1000
T = TypeVar("T")


class EngineBackend:
    """One session with a head in this process."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def front(self) -> Front:
        return self._front

    def health(self) -> Health:
        return Health(True, "", True, "")

    def figures(self) -> Mapping[str, Any]:
        return {}

    async def explain(self, seen: EngineDead) -> EngineDead:
        return seen


class Service:
    """What a test asks. Greedy output counts up from the prompt's last token, and every text is encoded as token 0."""

    def __init__(self, process: Process, client: FrontClient) -> None:
        self._process = process
        tokenizer = Tokenizer(TextPieces(PIECES, [END]), [END])
        backend = EngineBackend(Front(client, tokenizer, max_waiting=100))
        self._model = ServedModel(("m",), backend, tokenizer, PlayedTemplate(), GenerationDefaults(), MODEL_LEN, 1)

    async def completion(self, **body: Any) -> StartedCompletion:
        call = self._call()
        given = {"prompt": "x", "temperature": 0, "max_tokens": 20, **body}
        return await start_completion(call, parse_completion(given, call.settings))

    async def chat(self, **body: Any) -> StartedChat:
        call = self._call()
        given = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 20, **body}
        return await start_chat(call, parse_chat(given, call.settings))

    async def choice(self, kind: str, *, streams: bool, **body: Any) -> dict[str, Any]:
        """The text, the finish reason and the stop reason of an answer."""
        start = self.chat if kind == "chat" else self.completion
        started = await start(stream=streams, **body)
        if not streams:
            (choice,) = (await started.whole())["choices"]
            text = choice["message"]["content"] if kind == "chat" else choice["text"]
        else:
            *chunks, done = await read(started.chunks())
            assert done == "[DONE]"
            choices = [chunk["choices"][0] for chunk in chunks]
            texts = [c["delta"].get("content", "") if kind == "chat" else c["text"] for c in choices]
            assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
            choice, text = choices[-1], "".join(texts)
        return {"text": text, "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}

    def _call(self) -> Call:
        return Call(self._model, "m", ApiSettings(), "r")

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._process.call(self._process.head.stats())
        return stats

    def wait_for(self, **expected: int) -> None:
        """Until the engine's numbers are these."""
        until(lambda: expected.items() <= self.stats().items())

    def check_live(self) -> None:
        assert run(self.choice("completion", streams=False))["text"] == TEXT
        self.wait_for(running=0, waiting=0, free_blocks=self.stats()["total_blocks"])


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # A head scale of 0.2 leaves each token some chance.
    model: Path = write_succ(tmp_path_factory.mktemp("succ"), head_scale=0.2)
    with running(model, max_num_batched_tokens=16, max_model_len=MODEL_LEN) as (process, client):
        yield Service(process, client)


@pytest.fixture
def service(engine: Service) -> Iterator[Service]:
    yield engine
    engine.check_live()


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("stop", "found"),
    [
        (["beta gamma"], "beta gamma"),
        (["a b", "ha"], "ha"),
        (["delta"], "delta"),
        (["delta!", "alphabet"], None),
        (None, None),
    ],
)
def test_stop_strings_end_the_text_alike_in_chats_and_completions_streamed_and_whole(
    service: Service, stop: list[str] | None, found: str | None, included: bool
) -> None:
    end = len(TEXT) if found is None else TEXT.index(found) + (len(found) if included else 0)
    expected = {"text": TEXT[:end], "finish_reason": "stop", "stop_reason": found}
    for kind in ("chat", "completion"):
        for streams in (False, True):
            body = {"stop": stop, "include_stop_str_in_output": included}
            assert run(service.choice(kind, streams=streams, **body)) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1, "temperature": 1.0, "seed": 1},
        {"temperature": 1e-6},
        {"logit_bias": {"1": -100}},
        {"allowed_token_ids": [1, 2]},
    ],
)
def test_log_probabilities_are_finite_in_strict_json_and_echo_has_one_for_each_token_of_the_prompt(
    service: Service, params: dict[str, Any]
) -> None:
    body = {"prompt": [9, 10, 11], "logprobs": 5, "echo": True, "max_tokens": 1, **params}
    answer = strict(run(started_whole(service.completion(**body))))
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(entries) for entries in logprobs.values()} == {4}
    assert logprobs["token_logprobs"][0] is None
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    assert answer["choices"][0]["text"].startswith("<9><10><11>")
    assert logprobs["text_offset"][:3] == [0, 3, 7]
    for count in (0, 20):
        chat = strict(run(started_whole(service.chat(logprobs=True, top_logprobs=count, max_tokens=2, **params))))
        content = chat["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [count] * len(content)
        assert all(math.isfinite(one["logprob"]) for entry in content for one in [entry, *entry["top_logprobs"]])


async def started_whole(starting: Coroutine[Any, Any, StartedChat | StartedCompletion]) -> dict[str, Any]:
    return await (await starting).whole()


def strict(answer: dict[str, Any]) -> Any:
    """As it goes out, read by a parser that takes JSON alone."""
    return json.loads(to_json(answer), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_closing_a_stream_ends_its_work_in_the_engine(service: Service, kind: str) -> None:
    async def leave() -> None:
        body: dict[str, Any] = {"stream": True, "n": 3, "max_tokens": 900, "ignore_eos": True}
        if kind == "completion":
            body["prompt"] = [[10], [20]]
        start = service.chat if kind == "chat" else service.completion
        chunks = (await start(**body)).chunks()
        await anext(chunks)
        await chunks.aclose()

    run(leave())
    service.wait_for(running=0, waiting=0)


@pytest.mark.parametrize("prompts", [[[8]], [[8] * 900], [[number + 8] for number in range(12)]])
def test_cancelling_a_whole_answer_ends_its_work_also_in_prefill_and_in_the_queue(
    service: Service, prompts: list[list[int]]
) -> None:
    async def leave() -> None:
        started = await service.completion(prompt=prompts, max_tokens=900, ignore_eos=True, n=2)
        working = asyncio.ensure_future(started.whole())
        await asyncio.to_thread(until, lambda: service.stats()["running"] > 0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    run(leave())
    service.wait_for(running=0, waiting=0)


def test_several_answers_of_several_prompts_are_the_same_streamed_and_whole(service: Service) -> None:
    body = {"prompt": [[9], [50]], "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    whole = run(started_whole(service.completion(**body)))

    async def streamed() -> dict[int, str]:
        *chunks, _ = await read((await service.completion(stream=True, **body)).chunks())
        texts: dict[int, str] = {}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return texts

    assert run(streamed()) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens"] == 2


def test_the_best_of_several_answers_are_the_likeliest(service: Service) -> None:
    body = {"prompt": [9], "temperature": 1.0, "seed": 3, "max_tokens": 5, "ignore_eos": True, "logprobs": 0}
    all_of_them = run(started_whole(service.completion(n=5, **body)))["choices"]
    best = run(started_whole(service.completion(n=2, best_of=5, **body)))["choices"]
    likeliest = sorted(all_of_them, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))[:2]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in likeliest]


@pytest.mark.parametrize("size", [MODEL_LEN - 1, MODEL_LEN])
def test_a_prompt_gets_an_answer_as_long_as_it_leaves_room_for_one_token(service: Service, size: int) -> None:
    for max_tokens in (1, 10_000):
        body = {"prompt": [8] * size, "max_tokens": max_tokens}
        if size < MODEL_LEN:
            answer = run(started_whole(service.completion(**body)))
            assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 1)
            continue
        with pytest.raises(ApiError) as caught:
            run(started_whole(service.completion(**body)))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
