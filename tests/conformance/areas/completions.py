# SPDX-License-Identifier: MIT OR Apache-2.0
"""Completions of prompts: one and several, whole and as streams."""

from __future__ import annotations

from typing import Any

from tests.conformance.target import Target

NEEDS = ("completions",)
GREEDY: Any = {"temperature": 0, "max_tokens": 8}


def a_prompt_is_completed(target: Target) -> None:
    with target.client() as client:
        answer = client.completions.create(model=target.model, prompt="one two", **GREEDY)
    assert answer.object == "text_completion"
    assert answer.model == target.model
    (choice,) = answer.choices
    assert (choice.index, choice.logprobs) == (0, None)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= GREEDY["max_tokens"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def a_completion_stream_has_the_text_of_the_whole_answer(target: Target) -> None:
    with target.client() as client:
        whole = client.completions.create(model=target.model, prompt="one two", **GREEDY)
        stream = client.completions.create(
            model=target.model, prompt="one two", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def several_prompts_are_completed_in_order(target: Target) -> None:
    prompts = ["one", "two two", "three three three"]
    with target.client() as client:
        together = client.completions.create(model=target.model, prompt=prompts, **GREEDY)
        alone = [client.completions.create(model=target.model, prompt=prompt, **GREEDY) for prompt in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)


def several_prompts_of_several_choices_are_numbered_through(target: Target) -> None:
    with target.client() as client:
        answer = client.completions.create(model=target.model, prompt=["one", "two"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def an_echo_begins_with_the_prompt(target: Target) -> None:
    with target.client() as client:
        answer = client.completions.create(model=target.model, prompt="one two", echo=True, **GREEDY)
        plain = client.completions.create(model=target.model, prompt="one two", **GREEDY)
    assert answer.choices[0].text == "one two" + plain.choices[0].text


async def an_asynchronous_completion_is_the_same(target: Target) -> None:
    async with target.async_client() as client:
        whole = await client.completions.create(model=target.model, prompt="one two", **GREEDY)
        stream = await client.completions.create(model=target.model, prompt="one two", stream=True, **GREEDY)
        text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert text == whole.choices[0].text
