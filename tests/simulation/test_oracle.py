# SPDX-License-Identifier: MIT OR Apache-2.0
"""The oracle's answers: the same from its file, and cut where fewer tokens are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.catalogue import MAX_TOKENS, catalogue
from tests.simulation.oracle import Oracle
from tests.simulation.tiny_model import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model"))
    Oracle(folder)
    return folder


def test_answers_are_of_many_lengths_and_tokens(folder: Path) -> None:
    answers = [Oracle(folder).answer(index, 0, MAX_TOKENS) for index in range(len(catalogue()))]

    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert len({len(answer.token_ids) for answer in answers}) >= 4
    assert sum(len(set(answer.token_ids)) >= 6 for answer in answers) > len(answers) / 2


def test_a_shorter_answer_is_the_beginning_of_the_whole_one(folder: Path) -> None:
    oracle = Oracle(folder)
    index = next(i for i, entry in enumerate(catalogue()) if entry.name == "prompt logprobs")
    whole = oracle.answer(index, 0, MAX_TOKENS)

    short = oracle.answer(index, 0, 3)

    assert short.token_ids == whole.token_ids[:3]
    assert short.logprobs == whole.logprobs[:3]
    assert short.prompt_logprobs == whole.prompt_logprobs
    assert short.finish_reason == "length"


def test_an_answer_that_stops_before_its_limit_is_as_it_is(folder: Path) -> None:
    oracle = Oracle(folder)
    index = next(i for i, entry in enumerate(catalogue()) if entry.name == "stops")
    whole = oracle.answer(index, 0, MAX_TOKENS)
    assert whole.finish_reason == "stop"

    assert oracle.answer(index, 0, len(whole.token_ids)) == whole
    assert oracle.answer(index, 0, len(whole.token_ids) - 1).finish_reason == "length"
