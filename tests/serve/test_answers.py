# SPDX-License-Identifier: MIT OR Apache-2.0
"""The n answers to one prompt: each by its index, and the prompt's log probabilities."""

from __future__ import annotations

from typing import Any

from metrale_ray.protocol.front import Output
from metrale_ray.protocol.front.params_map import PackedParams
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.answers import Answers
from metrale_ray.serve.outputs import Logprob
from metrale_ray.serve.prompts import PromptRequest
from metrale_ray.serve.stop_strings import StopAutomaton
from tests.serve.pieces import piece_tokenizer

TOKENIZER = piece_tokenizer(["a", "b", "c"])


def answers_of(prompt: tuple[int, ...] = (0,), **params: Any) -> Answers:
    given = SamplingParams(**params)
    return Answers(
        "7", PromptRequest(None, prompt, given, PackedParams(given.for_tokens()), StopAutomaton(given.stop)), TOKENIZER
    )


def test_each_sequence_has_its_own_answer_and_the_request_ends_with_the_last() -> None:
    answers = answers_of(n=3, stop="c")
    assert not answers.push(Output(0, 2, (0,)))
    assert answers.push(Output(0, 1, (1, 2)))  # its text has ended, the head does not know
    assert not answers.push(Output(0, 0, (1,), "length"))
    first = answers.snapshot()
    assert not first.finished
    assert [(o.index, o.text, o.delta, o.finish_reason) for o in first.outputs] == [
        (0, "b", "b", "length"),
        (1, "b", "b", "stop"),
        (2, "a", "a", None),
    ]
    answers.push(Output(0, 1, (), "stop"))
    answers.push(Output(0, 2, (1,), "length"))
    last = answers.snapshot()
    assert last.finished
    assert [(o.text, o.delta) for o in last.outputs] == [("b", ""), ("b", ""), ("ab", "b")]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("7", None, [0])


def test_a_refusal_ends_all_answers_and_a_failure_its_own() -> None:
    answers = answers_of(n=2)
    answers.push(Output(0, 0, (), "error", None, ("command_failed", "an expert broke")))
    assert [o.finish_reason for o in answers.snapshot().outputs] == ["error", None]
    refused = answers_of(n=2)
    refused.push(Output(0, 0, (), "error", None, ("queue_full", "try later"), is_refusal=True))
    snapshot = refused.snapshot()
    assert snapshot.finished
    assert [(o.index, o.error_code, o.error) for o in snapshot.outputs] == [
        (0, "queue_full", "try later"),
        (1, "queue_full", "try later"),
    ]


def test_the_prompts_log_probabilities_come_in_parts_and_are_told_when_all_are_there() -> None:
    answers = answers_of((0, 1, 2), prompt_logprobs=1)
    answers.push(Output(0, 0, (), prompt_logprobs=(TokenLogprobs(1, -2.0, 2, (0,), (-0.5,)),)))
    assert not answers.has_news
    assert answers.snapshot().prompt_logprobs is None
    answers.push(Output(0, 0, (2,), prompt_logprobs=(TokenLogprobs(2, -1.0, 1, (2,), (-1.0,)),)))
    assert answers.has_news
    assert answers.snapshot().prompt_logprobs == [
        None,
        {1: Logprob(-2.0, 2, "b"), 0: Logprob(-0.5, 1, "a")},
        {2: Logprob(-1.0, 1, "c")},
    ]


def test_a_prompt_of_one_token_has_an_entry_that_says_nothing() -> None:
    answers = answers_of((0,), prompt_logprobs=0)
    answers.push(Output(0, 0, (1,)))
    assert answers.snapshot().prompt_logprobs == [None]
    unasked = answers_of((0,))
    unasked.push(Output(0, 0, (1,)))
    assert unasked.snapshot().prompt_logprobs is None
