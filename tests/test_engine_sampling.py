# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a request asks of its tokens, through the whole engine: the same whatever else runs, whatever is preempted,
and at every number of ranks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.config import FaultSpec
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.limits import MAX_PROMPT_LOGITS
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE, random_prompt, reference, reference_logits, write_tiny
from tests.harness import Answer, Driver, run_engine

SETTINGS: dict[str, Any] = {"max_model_len": 160, "max_batch_size": 17}
TIGHT: dict[str, Any] = SETTINGS | {"kv_cache_memory": 200_000, "block_size": 4}
EVERYTHING = TokenParams(
    temperature=1.3,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    seed=7,
    max_tokens=20,
    min_tokens=4,
    ignore_eos=True,
    stop_token_ids=[11],
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={9: 3.0, 12: -100.0},
    bad_token_ids=[[20], [9, 9]],
    logprobs=3,
    prompt_logprobs=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


def others(driver: Driver) -> None:
    """Sixteen requests of every kind."""
    generator = random.Random(3)
    for number in range(16):
        params = TokenParams(
            temperature=number % 3,
            seed=number,
            n=1 + number % 2,
            max_tokens=10 + number,
            frequency_penalty=0.5 * (number % 4),
            logprobs=None if number % 2 else 1,
            prompt_logprobs=None if number % 5 else 0,
            ignore_eos=True,
        )
        driver.submit(random_prompt(generator.randrange(1, 40), number), params, priority=number % 2)


def run_one(model: Path, params: TokenParams, before: Callable[[Driver], None] | None = None, **settings: Any) -> Any:
    """The outcome of one request, among others if they are given, and its number."""

    def script(driver: Driver) -> None:
        if before is not None:
            before(driver)
        numbers.append(driver.submit(random_prompt(23), params))
        driver.run()

    numbers: list[int] = []
    outcome = run_engine(model, script, **settings)
    assert outcome.head_error is None
    assert set(outcome.left.values()) <= {None}
    assert outcome.stats["free_blocks"] == outcome.stats["total_blocks"]
    return outcome, outcome.answers[numbers[0]]


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert (answer.finish_reason, answer.answers) == (expected.finish_reason, 1)
    assert_close(answer.logprobs, expected.logprobs)
    assert_close(answer.prompt_logprobs, expected.prompt_logprobs)


def assert_close(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """Equal but for the order in which ranks and batches add up."""
    assert [(each.token_id, each.rank, each.top_ids) for each in found] == [
        (each.token_id, each.rank, each.top_ids) for each in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-4)


@pytest.fixture(scope="module")
def alone(model: Path) -> Answer:
    answer: Answer = run_one(model, EVERYTHING, **SETTINGS)[1]
    return answer


def test_every_parameter_together_gives_what_it_should(alone: Answer) -> None:
    assert 4 <= len(alone.token_ids) <= 20
    assert [each.token_id for each in alone.logprobs] == alone.token_ids
    assert [each.token_id for each in alone.prompt_logprobs] == random_prompt(23)[1:]
    assert {len(each.top_ids) for each in alone.logprobs} == {3}
    assert {len(each.top_ids) for each in alone.prompt_logprobs} == {2}
    assert not {12, 20} & set(alone.token_ids)
    assert (9, 9) not in zip(alone.token_ids, alone.token_ids[1:], strict=False)


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", [SETTINGS, TIGHT], ids=["roomy", "preempted"])
def test_a_request_gets_the_same_alone_among_others_after_preemption_and_at_every_number_of_ranks(
    model: Path, alone: Answer, ep_size: int, settings: dict[str, Any]
) -> None:
    outcome, answer = run_one(model, EVERYTHING, others, ep_size=ep_size, **settings)
    assert_same(answer, alone)
    assert (outcome.stats["preemptions"] > 0) is (settings is TIGHT)


SQUEEZED = [
    TokenParams(temperature=0, max_tokens=60, ignore_eos=True),
    TokenParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True),
    TokenParams(temperature=0.8, seed=6, repetition_penalty=1.4, max_tokens=60, ignore_eos=True),
    TokenParams(temperature=0, presence_penalty=1.5, bad_token_ids=[[3]], max_tokens=60, ignore_eos=True),
] * 2


def test_eight_requests_that_must_preempt_one_another_get_what_each_gets_alone(model: Path) -> None:
    def submit(driver: Driver, numbers: list[int]) -> None:
        for number in numbers:
            driver.submit(random_prompt(3, number), SQUEEZED[number])
        driver.run()

    everybody = list(range(8))
    together = run_engine(
        model, lambda driver: submit(driver, everybody), max_model_len=110, block_size=4, kv_cache_memory=130_000
    )
    assert together.stats["preemptions"] > 0
    assert {len(tokens) for tokens in together.tokens()} == {60}
    for number in (0, 1, 2, 3, 7):
        solo = run_engine(model, lambda driver, number=number: submit(driver, [number]), max_model_len=110)
        assert together.tokens()[number] == solo.tokens()[0]


# The prompt's log probabilities.


@pytest.fixture(scope="module")
def expected_of_prompt(model: Path) -> list[float]:
    """The reference's log probabilities of a prompt's tokens but the first."""
    prompt = random_prompt(100)
    logprobs = torch.log_softmax(reference_logits(reference(model), prompt).double(), dim=1)
    return [float(logprobs[position, token]) for position, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("ep_size", [1, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 30, "ep_protocol": "v1"}], ids=str
)
def test_the_prompts_log_probabilities_are_the_references_in_chunks_of_any_size(
    model: Path, expected_of_prompt: list[float], ep_size: int, settings: dict[str, Any]
) -> None:
    params = TokenParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)
    largest = [0]

    def script(driver: Driver) -> None:
        watch_logits(driver, largest)
        for _ in range(2):
            driver.submit(random_prompt(100), params)
        driver.run()

    outcome = run_engine(model, script, ep_size=ep_size, max_model_len=160, **settings)
    for answer in outcome.answers.values():
        found = answer.prompt_logprobs
        assert [each.token_id for each in found] == random_prompt(100)[1:]
        assert [each.logprob for each in found] == pytest.approx(expected_of_prompt, abs=1e-3)
        for each in found:
            assert list(each.top_logprobs) == sorted(each.top_logprobs, reverse=True)
            assert (each.rank <= 4) is (each.token_id in each.top_ids)
    assert outcome.answers[0].token_ids == outcome.answers[1].token_ids
    assert largest[0] <= MAX_PROMPT_LOGITS + 1  # and one row of the other request, which decodes


def watch_logits(driver: Driver, largest: list[int]) -> None:
    """Note the most rows of logits that any step gave, and that none are kept."""
    replica = driver.engine._replica
    run = replica.run

    def note(frame: Any) -> Any:
        assert replica.logits is None, "the logits of the last step were kept"
        reply = run(frame)
        largest[0] = max(largest[0], 0 if replica.logits is None else len(replica.logits))
        return reply

    replica.run = note  # type: ignore[method-assign]


def test_only_the_first_of_several_sequences_brings_the_prompts_log_probabilities(model: Path) -> None:
    params = TokenParams(n=3, temperature=1.0, seed=1, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    outcome = run_engine(model, lambda d: (d.submit(random_prompt(9), params), d.run()), max_model_len=160)
    assert [len(answer.prompt_logprobs) for answer in outcome.answers.values()] == [8, 0, 0]


def test_a_prompt_of_one_token_has_no_log_probabilities(model: Path) -> None:
    params = TokenParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=5)
    outcome = run_engine(model, lambda d: (d.submit([5], params), d.run()), max_model_len=160)
    assert (outcome.answers[0].prompt_logprobs, len(outcome.answers[0].token_ids)) == ([], 2)


@pytest.mark.parametrize("kind", ["fail", "poison"])
@pytest.mark.parametrize("number", range(3, 8))
def test_the_prompts_log_probabilities_come_once_though_a_chunk_fails(model: Path, kind: Any, number: int) -> None:
    params = TokenParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1, logprobs=0)

    def script(driver: Driver) -> None:
        for each in range(3):
            driver.submit(random_prompt(20 + each, each), params)
        driver.run()

    settings: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 12, "ep_size": 2}
    healthy = run_engine(model, script, **settings)
    fault = FaultSpec(rank=1, phase="after", kind=kind, layer=1, command=number)
    outcome = run_engine(model, script, faults=(fault,), **settings)
    assert outcome.stats["failed_commands"] == 1
    for answer, expected in zip(outcome.answers.values(), healthy.answers.values(), strict=True):
        if answer.error is None:  # a row that fails alone in its step has nobody to prove its innocence
            assert_same(answer, expected)
        else:
            assert len(answer.prompt_logprobs) < 20
    assert sum(answer.error is not None for answer in outcome.answers.values()) <= 1


# The end.


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token t is followed by t + 1; two ids end a text."""
    folder = write_succ(tmp_path_factory.mktemp("succ"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    return folder


def answer_of(chain: Path, ep_size: int = 2, **params: Any) -> Answer:
    given = TokenParams(**{"temperature": 0, "max_tokens": 15, **params})
    return run_engine(chain, lambda d: (d.submit([4], given), d.run()), ep_size=ep_size).answers[0]


@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_text_of_min_tokens_does_not_end_before_it_has_them(chain: Path, ep_size: int) -> None:
    assert answer_of(chain, ep_size).token_ids == [5, 6, 7]
    longer = answer_of(chain, ep_size, min_tokens=10)
    assert longer.token_ids[:2] == [5, 6]
    assert len(longer.token_ids) >= 10
    assert not {2, 7} & set(longer.token_ids[:10])
    assert longer.token_ids == answer_of(chain, 3 - ep_size, min_tokens=10).token_ids
    assert not {2, 5, 6, 7} & set(
        answer_of(chain, ep_size, min_tokens=12, stop_token_ids=[5], end_token_ids=[6]).token_ids[:12]
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [5, 6, 7]),
        ({"ignore_eos": True, "max_tokens": 5}, [5, 6, 7, 8, 9]),
        ({"end_token_ids": [6]}, [5, 6]),
        ({"end_token_ids": [6, VOCAB_SIZE, 2**32 - 1]}, [5, 6]),
        ({"end_token_ids": [6], "ignore_eos": True, "max_tokens": 3}, [5, 6, 7]),
        ({"stop_token_ids": [5]}, [5]),
        ({"stop_token_ids": [8], "ignore_eos": True}, [5, 6, 7, 8]),
        ({"stop_token_ids": [VOCAB_SIZE - 1], "max_tokens": 2}, [5, 6]),
    ],
    ids=str,
)
def test_a_text_ends_at_the_checkpoints_the_tokenizers_and_its_own_ends(
    chain: Path, params: dict[str, Any], expected: list[int]
) -> None:
    answer = answer_of(chain, **params)
    assert answer.token_ids == expected
    assert answer.finish_reason == ("length" if "max_tokens" in params else "stop")


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"logit_bias": {100: 50.0}}, [100, 100, 100]),
        ({"logit_bias": {7: -100.0}}, [5, 6, 0]),
        ({"allowed_token_ids": [50, 51]}, [50, 51, 50]),
        ({"bad_token_ids": [[5], [0, 1]]}, [0, 0, 0]),
        ({"temperature": 100.0, "min_p": 1.0}, [5, 6, 7]),
        ({"temperature": 100.0, "top_k": 1, "seed": 3}, [5, 6, 7]),
    ],
    ids=str,
)
def test_biases_masks_and_cuts_reach_the_sampler_at_every_number_of_ranks(
    chain: Path, ep_size: int, params: dict[str, Any], expected: list[int]
) -> None:
    assert answer_of(chain, ep_size, max_tokens=3, ignore_eos=True, **params).token_ids == expected
