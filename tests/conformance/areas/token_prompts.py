# SPDX-License-Identifier: MIT OR Apache-2.0
"""Prompts that are token ids."""

from __future__ import annotations

from tests.conformance.target import Target

NEEDS = ("completions", "token-ids")


def token_ids_are_a_prompt(target: Target) -> None:
    with target.client() as client:
        answer = client.completions.create(model=target.model, prompt=[5, 6, 7], max_tokens=2, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def lists_of_token_ids_are_several_prompts(target: Target) -> None:
    with target.client() as client:
        answer = client.completions.create(model=target.model, prompt=[[5, 6, 7], [8]], max_tokens=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
