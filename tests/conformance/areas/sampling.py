# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a request says of how tokens are chosen: several choices, seeds, stops, limits, biases."""

from __future__ import annotations

from typing import Any

from tests.conformance.areas.chat import text_of
from tests.conformance.target import NotApplicable, Target

NEEDS = ("chat", "sampling")
MESSAGES: Any = [{"role": "user", "content": "one two three"}]


def n_choices_are_numbered(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(model=target.model, messages=MESSAGES, n=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.finish_reason for choice in answer.choices)
    assert answer.usage is not None
    assert 3 <= answer.usage.completion_tokens <= 12


def n_choices_of_a_stream_have_a_role_and_an_end_each(target: Target) -> None:
    with target.client() as client:
        chunks = list(
            client.chat.completions.create(
                model=target.model, messages=MESSAGES, n=2, max_tokens=4, temperature=0, stream=True
            )
        )
        whole = client.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=4, temperature=0)
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert choices[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == [choices[-1].finish_reason]
        assert text_of(chunks, index) == whole.choices[0].message.content


def the_same_seed_gives_the_same_answer(target: Target) -> None:
    with target.client() as client:
        texts = [
            client.chat.completions.create(model=target.model, messages=MESSAGES, seed=7, temperature=1.0, max_tokens=8)
            .choices[0]
            .message.content
            for _ in range(3)
        ]
    assert len(set(texts)) == 1


def a_stop_text_ends_the_answer_before_itself(target: Target) -> None:
    greedy: Any = {"model": target.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    with target.client() as client:
        text = client.chat.completions.create(**greedy).choices[0].message.content or ""
        clean = text.partition("\ufffd")[0]  # what is no whole character is no text to stop at
        if len(clean) < 3:
            raise NotApplicable(f"the answer {text!r} has no text to stop at")
        stop = clean[len(clean) // 2 :][:2]
        whole = client.chat.completions.create(stop=[stop], **greedy).choices[0]
        chunks = list(client.chat.completions.create(stop=stop, stream=True, **greedy))
    assert whole.message.content == text.partition(stop)[0]
    assert whole.finish_reason == "stop"
    assert text_of(chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def a_limit_of_tokens_is_kept_under_both_names(target: Target) -> None:
    with target.client() as client:
        newer = client.chat.completions.create(model=target.model, messages=MESSAGES, max_completion_tokens=1)
        older = client.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=1)
    for answer in (newer, older):
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1


def parameters_of_sampling_are_taken(target: Target) -> None:
    with target.client() as client:
        answer = client.chat.completions.create(
            model=target.model,
            messages=MESSAGES,
            max_tokens=4,
            temperature=0.7,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"5": -100},
            user="someone",
        )
    assert answer.choices[0].finish_reason in ("stop", "length")
