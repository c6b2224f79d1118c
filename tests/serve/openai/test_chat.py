# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chats, whole and streamed, with an engine that a test plays: shapes, calls of tools, reasoning, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.protocol.front.messages import Abort
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.openai.chat import StartedChat, start_chat
from metrale_ray.serve.openai.chat_request import parse_chat
from tests.serve.openai.played import Played, PlayedTemplate, documents, read, settle
from tests.serve.pieces import cut

USER = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "stop")
]
CALLS = (
    'First.\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n<tool_call>\n'
    '{"name": "look", "arguments": {"at": "a { </tool_call> \\" b", "n": [1, {"x": true}]}}\n</tool_call>'
)
THOUGHT = "<think>\nso it is\n</think>\n\nYes."


async def start(played: Played, **body: Any) -> StartedChat:
    call = played.call()
    return await start_chat(call, parse_chat({"messages": [USER], **body}, call.settings))


def say(played: Played, parts: Sequence[Sequence[int]], reason: str = "stop", index: int = 0, **more: Any) -> None:
    """The engine gives these parts, one after another, the last with the reason."""
    for part in parts[:-1]:
        played.head.say(0, index, *part)
    played.head.say(0, index, *parts[-1], finish_reason=reason, **more)


async def whole(played: Played, parts: Sequence[Sequence[int]], reason: str = "stop", **body: Any) -> Any:
    working = asyncio.ensure_future((await start(played, **body)).whole())
    await settle()
    say(played, parts, reason)
    return await working


async def streamed(played: Played, parts: Sequence[Sequence[int]], reason: str = "stop", **body: Any) -> list[Any]:
    reading = asyncio.ensure_future(read((await start(played, stream=True, **body)).chunks()))
    await settle()
    for part in parts[:-1]:
        played.head.say(0, 0, *part)
        await settle()
    played.head.say(0, 0, *parts[-1], finish_reason=reason)
    return await reading


def asked(played: Played, **body: Any) -> StructuredOutputs | None:
    """The form that the engine is asked to keep to."""
    return asyncio.run(start(played, **body)).work.request.params.structured_outputs


def joined(chunks: Sequence[Any]) -> dict[str, Any]:
    """The message that a reader of the stream puts together; checks the order of what comes."""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    assert chunks[-1] == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["delta"] == {}
    for choice in choices[1:]:
        delta = choice["delta"]
        assert set(delta) <= {"reasoning_content", "content", "tool_calls"}
        message["reasoning_content"] += delta.get("reasoning_content", "")
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert "name" not in call["function"]
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return {**message, "finish_reason": choices[-1]["finish_reason"]}


def of_whole(answer: Any) -> dict[str, Any]:
    """The same of an answer that was not streamed."""
    (choice,) = answer["choices"]
    message = choice["message"]
    return {
        "reasoning_content": message.get("reasoning_content") or "",
        "content": message["content"] or "",
        "tool_calls": [call["function"] for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }


def test_a_whole_answer_has_openais_shape() -> None:
    played = Played(["a", "b"])
    answer = asyncio.run(whole(played, [[0, 1], [1]], "length"))
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "played",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abb", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
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
    assert played.template.asked == [
        {
            "messages": [USER],
            "template": None,
            "tools": None,
            "variables": {},
            "add_generation_prompt": True,
            "continue_final_message": False,
        }
    ]


def test_a_stream_has_the_role_first_the_end_last_and_what_is_there_at_once_in_one_piece() -> None:
    async def script() -> None:
        played = Played(["a", "b"])
        chunks = (await start(played, stream=True, n=2, stream_options={"include_usage": True})).chunks()
        first = asyncio.ensure_future(anext(chunks))
        await settle()
        assert not first.done()
        played.head.say(0, 0, 0)
        played.head.say(0, 1, 1)
        told = documents(await first)
        found = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in told]
        role = {"role": "assistant", "content": "", "refusal": None}
        assert found == [(0, role), (0, {"content": "a"}), (1, role), (1, {"content": "b"})]
        say(played, [[1]], "length")
        say(played, [[0]], "length", index=1)
        *told, usage, done = await read(chunks)
        found = [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"], c["usage"]) for c in told]
        assert found == [
            ({"content": "b"}, None, None),
            ({}, "length", None),
            ({"content": "a"}, None, None),
            ({}, "length", None),
        ]
        assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 4, "[DONE]")
        assert {chunk["object"] for chunk in [*told, usage]} == {"chat.completion.chunk"}

    asyncio.run(script())


@given(cuts=st.lists(st.integers(0, len(CALLS)), max_size=30), together=st.lists(st.integers(0, 30), max_size=4))
def test_calls_of_tools_are_the_same_however_they_are_spelled_and_however_they_come(
    cuts: list[int], together: list[int]
) -> None:
    pieces = cut(CALLS, cuts)
    parts = [part for part in cut(list(range(len(pieces))), together) if part]

    async def script() -> None:
        options = {"tools": TOOLS, "temperature": 0}
        answer = await whole(Played(pieces, tool_parser="hermes"), parts, **options)
        told = of_whole(answer)
        assert told["finish_reason"] == "tool_calls"
        assert told["content"] == "First."
        assert [(call["name"], json.loads(call["arguments"])) for call in told["tool_calls"]] == [
            ("stop", {}),
            ("look", {"at": 'a { </tool_call> " b', "n": [1, {"x": True}]}),
        ]
        ids = [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
        assert len(set(ids)) == 2
        chunks = await streamed(Played(pieces, tool_parser="hermes"), parts, **options)
        assert joined(chunks) == told

    asyncio.run(script())


def test_a_call_that_is_cut_is_reported_as_length_in_both_ways() -> None:
    pieces = cut(CALLS[:60], range(0, 60, 7))
    parts = [[number] for number in range(len(pieces))]
    told = of_whole(asyncio.run(whole(Played(pieces, tool_parser="hermes"), parts, "length", tools=TOOLS)))
    assert told["finish_reason"] == "length"
    chunks = asyncio.run(streamed(Played(pieces, tool_parser="hermes"), parts, "length", tools=TOOLS))
    assert joined(chunks) == told


@pytest.mark.parametrize(
    ("choice", "stop"),
    [
        ("auto", "Lima"),
        ("required", "Lima"),
        ({"type": "function", "function": {"name": "look"}}, "Lima"),
        ("auto", None),
    ],
)
def test_a_call_that_a_stop_string_or_the_model_cuts_is_reported_as_length_too(choice: Any, stop: str | None) -> None:
    pieces = ['<tool_call>{"name": "look", "arguments": {"at": "', "Li", "ma", '"}}', "</tool_call>"]
    for num_parts, is_cut in ((3, True), (4, stop is not None), (5, stop is not None)):
        options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "stop": stop, "temperature": 0}
        parts = [[number] for number in range(num_parts)]
        answer = asyncio.run(whole(Played(pieces, tool_parser="hermes"), parts, **options))
        told = of_whole(answer)
        assert (told["finish_reason"] == "length") is is_cut
        assert answer["choices"][0]["stop_reason"] == stop
        (call,) = told["tool_calls"]
        assert call["arguments"] == ('{"at": "' + ("" if stop else "Lima") + ("" if is_cut else '"}'))
        assert joined(asyncio.run(streamed(Played(pieces, tool_parser="hermes"), parts, **options))) == told


def test_a_demanded_function_ends_with_stop_and_its_form_is_a_grammar_that_begins_at_once() -> None:
    choice = {"type": "function", "function": {"name": "stop"}}
    text = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    for tool_choice, reason in ((choice, "stop"), ("required", "tool_calls")):
        played = Played([text])
        told = of_whole(asyncio.run(whole(played, [[0]], tools=TOOLS, tool_choice=tool_choice)))
        assert (told["tool_calls"], told["finish_reason"]) == ([{"name": "stop", "arguments": "{}"}], reason)
        shape = asked(Played([text]), tools=TOOLS, tool_choice=tool_choice)
        assert shape is not None
        for form in ({"response_format": {"type": "json_object"}}, {"guided_regex": "a"}):
            assert asked(Played([text]), tools=TOOLS, tool_choice=tool_choice, **form) == shape
        assert shape.after is None
        assert "stop" in str(shape.grammar)
    assert asked(Played([text], tool_parser="hermes"), tools=TOOLS) is None


def test_an_answer_with_a_schema_may_be_calls_instead_where_tools_are_free() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "Found"}}}
    for body, has_calls in (
        ({"response_format": schema}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": schema, "tool_choice": "none"}, False),
        ({"structured_outputs": {"choice": ["Found"]}}, False),
    ):
        shape = asked(Played(["x"], tool_parser="hermes"), tools=TOOLS, **body)
        assert shape is not None
        assert ("look" in str(shape.grammar)) is has_calls
        assert "Found" in str(shape) or body["response_format"] == {"type": "json_object"}


def test_tool_choice_none_makes_everything_content_and_the_template_sees_no_tools() -> None:
    played = Played([CALLS], tool_parser="hermes")
    told = of_whole(asyncio.run(whole(played, [[0]], tools=TOOLS, tool_choice="none")))
    assert (told["content"], told["tool_calls"], told["finish_reason"]) == (CALLS, [], "stop")
    assert played.template.asked[0]["tools"] is None
    again = Played(["x"], tool_parser="hermes")
    asyncio.run(whole(again, [[0]], tools=TOOLS))
    assert [tool["function"]["name"] for tool in again.template.asked[0]["tools"]] == ["look", "stop"]


def test_special_tokens_are_kept_for_a_parser_that_reads_them_and_ids_are_as_short_as_its_family_wants() -> None:
    pieces = ["[TOOL_CALLS]", '[{"name": "look", "arguments": {"at": 1}}]', "</s>"]
    played = Played(pieces, special=[0, 2], tool_parser="mistral")

    async def script() -> Any:
        working = asyncio.ensure_future((await start(played, tools=TOOLS)).whole())
        await settle()
        say(played, [[0, 1, 2]], stop_token_id=2)
        return await working

    answer = asyncio.run(script())
    assert of_whole(answer)["tool_calls"] == [{"name": "look", "arguments": '{"at": 1}'}]
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


@given(
    cuts=st.lists(st.integers(0, len(THOUGHT)), max_size=20),
    together=st.lists(st.integers(0, 20), max_size=4),
    opens=st.booleans(),
)
def test_reasoning_has_its_own_field_and_its_tokens_are_counted_however_they_come(
    cuts: list[int], together: list[int], opens: bool
) -> None:
    """`opens`: the prompt has opened the reasoning."""
    text = THOUGHT.removeprefix("<think>\n") if opens else THOUGHT
    pieces = cut(text, cuts)
    parts = [part for part in cut(list(range(len(pieces))), together) if part]
    begin = text.index("Yes")
    num_before = next(count for count in range(len(pieces) + 1) if len("".join(pieces[: count + 1])) > begin)

    async def script(suffix: str) -> None:
        def played() -> Played:
            return Played(pieces, reasoning_parser="think", template=PlayedTemplate(suffix))

        answer = await whole(played(), parts)
        told = of_whole(answer)
        assert (told["reasoning_content"], told["content"]) == ("so it is", "Yes.")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_before}
        assert joined(await streamed(played(), parts)) == told

    asyncio.run(script("<think>\n" if opens else ""))


@pytest.mark.parametrize(
    ("parser", "suffix", "marks"),
    [
        ("think", "<think>\n", ("</think>", None)),
        ("think", "<think>\n\n</think>\n\n", (None, None)),
        ("think", "", ("</think>", "<think>")),
        ("think_open", "", ("</think>", None)),
        (None, "", (None, None)),
    ],
)
def test_a_constraint_waits_for_the_end_of_reasoning_that_is_open_or_that_the_model_opens(
    parser: str | None, suffix: str, marks: tuple[str | None, str | None]
) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": strict},
    ]
    for body in bodies:
        played = Played(["x"], reasoning_parser=parser, tool_parser="hermes", template=PlayedTemplate(suffix))
        shape = asked(played, **body)
        assert shape is not None
        assert (shape.after, shape.opening) == marks


def test_reasoning_that_no_text_opens_is_read_from_the_beginning_of_an_answer_and_not_of_its_continuation() -> None:
    def played() -> Played:
        return Played(["so it is", "</think>", "\n\nYes."], reasoning_parser="think_open")

    told = of_whole(asyncio.run(whole(played(), [[0], [1], [2]])))
    assert (told["reasoning_content"], told["content"]) == ("so it is", "Yes.")
    assert joined(asyncio.run(streamed(played(), [[0], [1], [2]]))) == told
    begun = [USER, {"role": "assistant", "content": "Y"}]
    told = of_whole(asyncio.run(whole(played(), [[0]], messages=begun, continue_final_message=True)))
    assert (told["reasoning_content"], told["content"]) == ("", "so it is")


def test_log_probabilities_have_bytes_and_the_likeliest_tokens() -> None:
    async def script() -> None:
        played = Played(["a", "é", "\ufffd"])
        body = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "prompt_logprobs": 0}
        working = asyncio.ensure_future((await start(played, **body)).whole())
        await settle()
        entry = TokenLogprobs(1, -1.5, 2, (0,), (-0.25,))
        played.head.say(0, 0, 1, logprobs=(entry,), finish_reason="length")
        answer = await working
        (choice,) = answer["choices"]
        assert choice["logprobs"] == {
            "content": [
                {
                    "token": "é",
                    "logprob": -1.5,
                    "bytes": [195, 169],
                    "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}],
                }
            ],
            "refusal": None,
        }
        assert (answer["prompt_token_ids"], choice["token_ids"], answer["prompt_logprobs"]) == ([0], [1], [None])

    asyncio.run(script())


def test_a_stream_tells_of_the_prompt_once_and_of_tokens_whose_text_is_held_back() -> None:
    async def script() -> None:
        played = Played(["a", "b"])
        body = {"stream": True, "logprobs": True, "return_token_ids": True, "stop": "ab"}
        chunks = (await start(played, **body)).chunks()
        first = asyncio.ensure_future(anext(chunks))
        await settle()
        played.head.say(0, 0, 0, logprobs=(TokenLogprobs(0, -1.0, 1),))
        role, held = documents(await first)
        assert role["prompt_token_ids"] == [0]
        assert "prompt_token_ids" not in held
        assert (held["choices"][0]["delta"], held["choices"][0]["token_ids"]) == ({}, [0])
        assert [entry["token"] for entry in held["choices"][0]["logprobs"]["content"]] == ["a"]
        say(played, [[0]], "length", logprobs=(TokenLogprobs(0, -1.0, 1),))
        rest, end, done = await read(chunks)
        assert (rest["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({"content": "aa"}, "length")
        assert done == "[DONE]"

    asyncio.run(script())


def test_leaving_a_chat_aborts_all_its_answers() -> None:
    async def script() -> None:
        played = Played(["a"])
        working = asyncio.ensure_future((await start(played, n=3)).whole())
        await settle()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert played.head.said == [Abort(0)]
        assert played.meter.reasons == ["abort"] * 3

    asyncio.run(script())


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_request", None),
        ({"messages": [{**USER, "content": "x" * 30_000}]}, "context_length_exceeded", "messages"),
        ({"tools": TOOLS}, "no_tool_parser", "tools"),
        ({"stop_token_ids": [99]}, "invalid_request", "stop_token_ids"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_sent(
    body: dict[str, Any], code: str, param: str | None
) -> None:
    played = Played(["a"])
    with pytest.raises(ApiError) as caught:
        asyncio.run(start(played, **body))
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.param == (param or "messages[0].content[0].type")
    assert played.head.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tools"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_a_form_that_fails_while_it_is_written_is_the_callers_mistake(body: dict[str, Any], param: str) -> None:
    async def script() -> None:
        played = Played(["a"])
        working = asyncio.ensure_future((await start(played, **body)).whole())
        await settle()
        played.head.say(0, 0, finish_reason="error", error=("grammar_failed", "it cannot go on"))
        with pytest.raises(ApiError, match="it cannot go on") as caught:
            await working
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "grammar_failed", param)

    asyncio.run(script())


class NoGrammar:
    """Refuses every grammar."""

    async def checked(self, params: SamplingParams, tokenizer: object) -> SamplingParams:
        raise RequestError("it makes no sense", code="invalid_grammar", param="structured_outputs")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_what_is_wrong_with_a_form_is_told_by_the_field_it_comes_from(body: dict[str, Any], param: str) -> None:
    played = Played(["a"], grammars=NoGrammar())
    with pytest.raises(ApiError, match="it makes no sense") as caught:
        asyncio.run(start(played, **body))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_grammar", param)
    assert played.head.submitted == []
