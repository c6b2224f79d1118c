# SPDX-License-Identifier: MIT OR Apache-2.0
"""Grammars in a whole engine: every answer has its shape, at every number of ranks, beside others, preempted or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.grammar.constraint import Constraint
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.grammar.texts import Part, grammar_text, of_choice, of_grammar, of_json, of_regex
from metrale_ray.sampling.token_params import TokenParams
from tests.fixtures.tiny import VOCAB_SIZE, write_tiny
from tests.fixtures.tokenizer import write_tokenizer
from tests.harness import Answer, Driver, Outcome, run_engine

END = 0
KV_BYTES = 120_000  # not enough for all sequences at once
PROMPT = [40, 41, 42, 43]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b"]},
        "many": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "many"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, byte tokens, and an end."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe", eos_token_id=END)
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(model: Path) -> Grammars:
    return Grammars(model, VOCAB_SIZE, [END])


class Asked:
    """Requests with grammars for one run."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def submit(self, driver: Driver, part: Part, *, prompt: list[int] = PROMPT, **params: Any) -> int:
        text = grammar_text(part)
        given = TokenParams(**{"temperature": 0, "max_tokens": 60, "grammar": text, **params})
        constraint: Constraint = self._grammars.compile(text)
        return driver.submit(prompt, given, constraint=constraint)

    def text(self, answer: Answer) -> str:
        """The bytes of all tokens but the end."""
        return str(self._grammars.load().tokenizer.decode_str([t for t in answer.token_ids if t != END]))


@pytest.fixture(scope="module")
def asked(grammars: Grammars) -> Asked:
    return Asked(grammars)


SHAPES = [of_json(json.dumps(SCHEMA)), of_regex("[a-c]{3}-\\d+x"), of_choice(["yes", "no"]), of_grammar('start: "q"')]
PLAIN = TokenParams(temperature=0, max_tokens=12, ignore_eos=True)


def _shapes_run(model: Path, asked: Asked, **settings: Any) -> Outcome:
    def script(driver: Driver) -> None:
        for seed, part in enumerate(SHAPES):
            asked.submit(driver, part)
            asked.submit(driver, part, temperature=1.0, seed=seed)
            driver.submit([*PROMPT, seed], PLAIN)
        driver.run()

    return run_engine(model, script, **{"max_batch_size": 16, **settings})


@pytest.fixture(scope="module")
def by_one_rank(model: Path, asked: Asked) -> Outcome:
    return _shapes_run(model, asked)


def test_each_answer_has_its_shape_and_ends_by_the_end_token(by_one_rank: Outcome, asked: Asked) -> None:
    answers = [by_one_rank.answers[number] for number in range(12)]
    for one in (answers[0], answers[1]):
        assert set(json.loads(asked.text(one))) == {"name", "kind", "many"}
    assert [asked.text(one) in ("yes", "no") for one in answers[6:8]] == [True, True]
    assert [asked.text(one) for one in answers[9:11]] == ["q", "q"]
    for one in (*answers[0:2], *answers[6:8], *answers[9:11]):
        assert (one.finish_reason, one.token_ids[-1], one.answers) == ("stop", END, 1)


def test_the_rows_beside_them_are_not_touched(model: Path, by_one_rank: Outcome) -> None:
    def script(driver: Driver) -> None:
        for seed in range(len(SHAPES)):
            driver.submit([*PROMPT, seed], PLAIN)
        driver.run()

    alone = run_engine(model, script, max_batch_size=16).tokens()
    assert [by_one_rank.answers[3 * index + 2].token_ids for index in range(len(SHAPES))] == alone


@pytest.mark.parametrize("ep_size", [2, 3])
def test_every_number_of_ranks_gives_the_same(model: Path, asked: Asked, by_one_rank: Outcome, ep_size: int) -> None:
    assert _shapes_run(model, asked, ep_size=ep_size).tokens() == by_one_rank.tokens()


def test_a_preempted_sequence_goes_on_where_its_grammar_was(model: Path, asked: Asked, by_one_rank: Outcome) -> None:
    tight = _shapes_run(model, asked, max_model_len=160, block_size=4, kv_cache_memory=KV_BYTES)
    assert tight.stats["preemptions"] > 0
    assert tight.tokens() == by_one_rank.tokens()


def test_the_sequences_of_one_request_each_have_their_own_place(model: Path, asked: Asked) -> None:
    part = of_regex("[ab]{4}")

    def script(driver: Driver) -> None:
        asked.submit(driver, part, n=4, temperature=5.0, seed=1)
        driver.run()

    outcome = run_engine(model, script, max_batch_size=4)
    texts = [asked.text(outcome.answers[index]) for index in range(4)]
    assert all(len(text) == 4 and set(text) <= {"a", "b"} for text in texts)
    assert len(set(texts)) > 1


def test_the_grammar_wins_over_min_tokens_and_ignore_eos(model: Path, asked: Asked) -> None:
    def script(driver: Driver) -> None:
        asked.submit(driver, of_choice(["no"]), min_tokens=30)
        asked.submit(driver, of_choice(["no"]), ignore_eos=True)
        asked.submit(driver, of_regex("n*"), min_tokens=5, logit_bias={END: 100.0}, max_tokens=10)
        asked.submit(driver, of_regex("n*"), ignore_eos=True, logit_bias={END: 100.0}, max_tokens=10)
        driver.run()

    answers = run_engine(model, script, max_batch_size=4).answers
    assert [(asked.text(answers[number]), answers[number].finish_reason) for number in (0, 1)] == [("no", "stop")] * 2
    assert (asked.text(answers[2]), answers[2].finish_reason) == ("n" * 5, "stop")
    assert (asked.text(answers[3]), answers[3].finish_reason) == ("n" * 10, "length")


def test_log_probabilities_stay_finite_under_a_grammar(model: Path, asked: Asked) -> None:
    def script(driver: Driver) -> None:
        asked.submit(driver, of_choice(["yes", "no"]), logprobs=5)
        driver.run()

    answer = run_engine(model, script).answers[0]
    values = [value for each in answer.logprobs for value in (each.logprob, *each.top_logprobs)]
    assert len(values) == 6 * len(answer.token_ids)
    assert all(-1e4 < value <= 0 for value in values)
    json.dumps(values, allow_nan=False)


def test_a_grammar_that_fails_in_a_step_ends_its_sequence_alone(model: Path, asked: Asked) -> None:
    constraints: list[Constraint] = []

    def script(driver: Driver) -> None:
        asked.submit(driver, of_regex("[ab]{40}"))
        asked.submit(driver, of_regex("[ab]{40}"))
        for _ in range(5):
            driver.engine.step()
        live = driver.engine._live
        constraints.append(live[next(iter(live))].constraint)  # type: ignore[arg-type]
        constraints[0].advance(END)  # what it does not allow: it can never go on
        driver.run()

    outcome = run_engine(model, script, max_batch_size=4)
    failed, other = outcome.answers[0], outcome.answers[1]
    assert failed.error is not None
    assert failed.error[0] == "grammar_failed"
    assert (failed.finish_reason, failed.answers) == ("error", 1)
    assert (len(asked.text(other)), other.finish_reason) == (40, "stop")
