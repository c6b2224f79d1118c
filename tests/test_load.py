# SPDX-License-Identifier: MIT OR Apache-2.0
"""Many requests at once, aborts at random, ranks without work: nobody gets another's tokens and nothing is left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.sampling.params import SamplingParams
from metrale_ray.scheduler.request import RequestId
from tests.fixtures.route import experts_of_token, write_route
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE
from tests.harness import Driver, run_engine


@pytest.fixture(scope="module")
def succ(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_succ(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_route(tmp_path_factory.mktemp("route"))


def chain(start: int, length: int) -> list[int]:
    return [(start + step) % VOCAB_SIZE for step in range(1, length + 1)]


@pytest.mark.parametrize("ep_size", [2, 4])
def test_requests_that_come_and_go_at_random_leave_the_others_chains_unbroken(
    succ: Path, ep_size: int, scale: int
) -> None:
    generator = random.Random(3)
    aborted: set[int] = set()
    wanted: dict[int, tuple[int, int]] = {}

    def script(driver: Driver) -> None:
        waiting = 64 * scale
        while waiting or driver.engine.stats()["running"] or driver.engine.stats()["waiting"]:
            if waiting and generator.random() < 0.5:
                waiting -= 1
                first, length = generator.randrange(VOCAB_SIZE), generator.randrange(1, 40)
                prompt = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(20))] + [first]
                params = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
                wanted[driver.submit(prompt, params)] = (first, length)
            if wanted and generator.random() < 0.1:
                number = generator.choice(list(wanted))
                if driver.answers[number].finish_reason is None:
                    aborted.add(number)
                    driver.engine.abort(RequestId(number))
            driver.engine.step()
        golden = driver.submit([7], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        driver.run()
        assert driver.answers[golden].token_ids == chain(7, 5)

    outcome = run_engine(
        succ,
        script,
        ep_size=ep_size,
        max_batch_size=8,
        max_num_batched_tokens=24,
        block_size=4,
        kv_cache_memory=80_000,
    )
    assert outcome.head_error is None
    assert aborted
    for number, (first, length) in wanted.items():
        answer = outcome.answers[number]
        assert answer.token_ids == chain(first, length)[: len(answer.token_ids)]
        assert (answer.finish_reason == "length") is (number not in aborted)
    stats = outcome.stats
    assert (stats["running"], stats["waiting"], stats["free_blocks"]) == (0, 0, stats["total_blocks"])
    assert stats["preemptions"] > 0


def only(rank: int, ep_size: int) -> list[int]:
    """Tokens whose two experts are both on `rank`, of 8 experts over `ep_size` ranks."""
    share = 8 // ep_size
    mine = set(range(rank * share, (rank + 1) * share))
    return [token for token in range(VOCAB_SIZE - 8) if set(experts_of_token(token)) <= mine]


def greedy(prompts: list[list[int]], max_tokens: int = 4) -> Any:
    def script(driver: Driver) -> None:
        for prompt in prompts:
            driver.submit(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        driver.run()

    return script


@pytest.mark.parametrize("ep_size", [2, 4])
def test_prompts_for_one_ranks_experts_alone_and_mixed_with_others_are_answered_as_on_one_rank(
    route: Path, ep_size: int
) -> None:
    one_sided = [only(rank, ep_size) for rank in range(ep_size)]
    prompts = [tokens[:1] for tokens in one_sided] + [(tokens * 64)[:64] for tokens in one_sided]
    prompts += [list(range(20, 60)), list(range(100, 103))]
    settings = {"max_batch_size": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    expected = run_engine(route, greedy(prompts), **settings).tokens()
    outcome = run_engine(route, greedy(prompts), ep_size=ep_size, **settings)
    assert outcome.tokens() == expected
    assert set(outcome.left.values()) == {None}


@pytest.mark.parametrize("ep_size", [1, 3])
def test_every_prompt_length_and_batch_size_around_the_rungs_is_answered(succ: Path, ep_size: int) -> None:
    rungs = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    sizes = sorted({max(1, rung + delta) for rung in rungs for delta in (-1, 0, 1)})
    prompts = [[*range(size - 1), 200] for size in sizes] + [[*range(511), 9], [*range(511), 0, 9]]
    outcome = run_engine(succ, greedy([[t % VOCAB_SIZE for t in p] for p in prompts]), ep_size=ep_size)
    assert outcome.tokens() == [chain(prompt[-1], 4) for prompt in prompts]
    for size in sizes:
        batch = [[(7 * row) % VOCAB_SIZE] for row in range(size)]
        outcome = run_engine(succ, greedy(batch, 3), ep_size=ep_size, max_batch_size=129, max_model_len=16)
        assert outcome.tokens() == [chain(prompt[-1], 3) for prompt in batch], size
