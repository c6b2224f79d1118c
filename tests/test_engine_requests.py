# SPDX-License-Identifier: MIT OR Apache-2.0
"""The life of requests in the whole engine: several sequences, aborts in every phase, deadlines, priorities, refusals
and the sampler's errors. After each, nothing is left on any rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import FaultSpec
from metrale_ray.errors import RequestError
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import RequestId
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE, random_prompt, write_tiny
from tests.harness import GREEDY, Driver, Outcome, run_engine

SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_batch_size": 4, "max_num_batched_tokens": 8, "block_size": 4}
LONG = TokenParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


@pytest.fixture(scope="module")
def succ(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token t is followed by t + 1, surely when greedy and often when not."""
    return write_succ(tmp_path_factory.mktemp("succ"))


def chain(start: int, length: int) -> list[int]:
    return [(start + step) % VOCAB_SIZE for step in range(1, length + 1)]


def run(model: Path, script: Callable[[Driver], None], **settings: Any) -> Outcome:
    """Run `script`, then a request that must be answered as ever, and look whether anything is left."""

    def whole(driver: Driver) -> None:
        script(driver)
        driver.run()
        driver.engine.ping()  # all digests agree
        slots = driver.engine._replica.slots
        assert (slots.num_live, slots.num_owned_blocks) == (0, 0)
        assert not driver.engine._live
        assert len(driver.engine._deadlines) == 0

    outcome = run_engine(model, whole, **{**SETTINGS, **settings})
    assert outcome.head_error is None
    assert set(outcome.left.values()) <= {None}
    stats = outcome.stats
    assert (stats["running"], stats["waiting"], stats["free_blocks"]) == (0, 0, stats["total_blocks"])
    return outcome


def steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.engine.step()


# Several sequences.


@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_sequences_of_a_request_differ_and_the_first_is_what_one_alone_would_be(model: Path, ep_size: int) -> None:
    def submit(n: int, seed: int | None) -> Callable[[Driver], None]:
        params = TokenParams(n=n, temperature=1.2, seed=seed, max_tokens=12, ignore_eos=True)
        return lambda driver: void(driver.submit(random_prompt(11), params))

    for seed in (5, None):
        several = run(model, submit(4, seed), ep_size=ep_size, kv_cache_memory=60_000).tokens()
        assert len({tuple(tokens) for tokens in several}) == 4
        assert run(model, submit(1, seed)).tokens() == several[:1]
        assert run(model, submit(2, seed)).tokens() == several[:2]


def void(_: object) -> None:
    """For scripts of one expression."""


def test_one_sequence_may_be_finished_while_the_others_go_on(succ: Path) -> None:
    def script(driver: Driver) -> None:
        first = driver.submit([5], TokenParams(n=3, temperature=0, max_tokens=10, ignore_eos=True))
        steps(driver, 4)
        driver.engine.finish(RequestId(first + 1))

    outcome = run(succ, script)
    assert outcome.answers[1].answers == 0
    assert [outcome.answers[n].token_ids for n in (0, 2)] == [chain(5, 10)] * 2
    assert outcome.stats["finished_requests"] == 3


@pytest.mark.parametrize("ep_size", [1, 3])
@pytest.mark.parametrize("num_steps", range(9))
def test_a_request_of_four_sequences_that_is_aborted_in_any_phase_leaves_nothing(
    model: Path, num_steps: int, ep_size: int
) -> None:
    """Two slots: some wait while others are in the middle of their prompt, or decode."""
    params = TokenParams(n=4, temperature=1.0, max_tokens=30, ignore_eos=True, prompt_logprobs=1, presence_penalty=0.5)

    def script(driver: Driver) -> None:
        driver.submit(random_prompt(5), GREEDY)
        driver.submit(random_prompt(20), params)
        steps(driver, num_steps)
        for number in range(1, 5):
            driver.engine.abort(RequestId(number))

    outcome = run(model, script, ep_size=ep_size, max_batch_size=2)
    assert outcome.answers[0].finish_reason == "length"
    assert [outcome.answers[n].answers for n in range(1, 5)] == [0, 0, 0, 0]


def test_a_request_that_finds_no_room_for_all_its_sequences_is_refused_whole(succ: Path) -> None:
    def script(driver: Driver) -> None:
        driver.submit([1], GREEDY)
        with pytest.raises(RequestError, match="1 requests wait and 3 more would") as caught:
            driver.submit([2], TokenParams(n=3))
        codes.append(caught.value.code)
        driver.submit([3], TokenParams(n=2, temperature=0, max_tokens=2, ignore_eos=True))

    codes: list[str] = []
    outcome = run(succ, script, max_queue_len=3)
    assert codes == ["queue_full"]
    assert [answer.token_ids for answer in outcome.answers.values() if answer.answers] == [
        chain(1, 8),
        chain(3, 2),
        chain(3, 2),
    ]


# Deadlines.


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_request_past_its_deadline_is_told_so_waiting_or_running_and_keeps_its_tokens(
    succ: Path, num_steps: int, ep_size: int
) -> None:
    def script(driver: Driver) -> None:
        driver.submit([*range(10), 5], TokenParams(**WITH_TWO), deadline_s=10.0)
        driver.submit([7], GREEDY, deadline_s=99.0)
        driver.engine.expire(9.9)
        steps(driver, num_steps)
        driver.engine.expire(10.0)
        driver.engine.expire(50.0)

    outcome = run(succ, script, ep_size=ep_size, max_batch_size=2)
    for number in (0, 1):
        answer = outcome.answers[number]
        assert (answer.finish_reason, answer.answers) == ("error", 1)
        assert answer.error is not None
        assert answer.error[0] == "deadline_exceeded"
        assert answer.token_ids == chain(5, 40)[: len(answer.token_ids)]
    assert len(outcome.answers[0].token_ids) == {0: 0, 1: 0, 2: 1, 5: 4}[num_steps]
    assert outcome.answers[2].token_ids == chain(7, 8)
    assert (outcome.stats["expired_requests"], outcome.stats["failed_requests"]) == (2, 2)


WITH_TWO: dict[str, Any] = {"n": 2, "temperature": 0, "max_tokens": 40, "ignore_eos": True}


def test_a_deadline_is_noticed_in_a_search_for_a_failing_row_and_the_guilty_is_still_found(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="inside", first_token=13)
    prompts = [[11, 50], [12, 51], [13, 52], [14, 53]]

    def script(driver: Driver) -> None:
        for number, prompt in enumerate(prompts):
            driver.submit(prompt, GREEDY, deadline_s=5.0 if number < 2 else None)
        while not driver.engine._recovery.is_under_way:
            driver.engine.step()
        driver.engine.expire(5.0)
        assert [driver.answers[n].error[0] for n in (0, 1)] == ["deadline_exceeded"] * 2  # type: ignore[index]
        assert driver.engine._recovery.is_under_way

    outcome = run(model, script, ep_size=2, faults=(fault,))
    healthy = run(model, lambda driver: void([driver.submit(prompt, GREEDY) for prompt in prompts]))
    assert [answer.error and answer.error[0] for answer in outcome.answers.values()] == [
        "deadline_exceeded",
        "deadline_exceeded",
        "command_failed",
        None,
    ]
    assert outcome.answers[3].token_ids == healthy.answers[3].token_ids


def test_a_request_that_ended_in_time_is_never_late(succ: Path) -> None:
    def script(driver: Driver) -> None:
        driver.submit([1], GREEDY, deadline_s=5.0)
        driver.run()
        driver.engine.expire(1e9)

    assert run(succ, script).answers[0].finish_reason == "length"


@pytest.mark.parametrize("ep_size", [2, 4])
def test_ranks_stay_in_step_while_requests_expire_leave_and_overtake_at_random(
    succ: Path, ep_size: int, scale: int
) -> None:
    generator = random.Random(ep_size)
    numbers: list[tuple[int, int]] = []

    def script(driver: Driver) -> None:
        for now_s in range(100 * scale):
            if generator.random() < 0.5:
                start = generator.randrange(VOCAB_SIZE)
                params = TokenParams(
                    n=generator.choice([1, 1, 3]),
                    temperature=0.5,
                    max_tokens=generator.randrange(1, 30),
                    ignore_eos=True,
                )
                deadline_s = now_s + generator.randrange(1, 20) if generator.random() < 0.7 else None
                prompt = [0] * generator.randrange(10) + [start]
                number = driver.submit(prompt, params, priority=generator.randrange(-2, 3), deadline_s=deadline_s)
                numbers.extend((number + index, start) for index in range(params.n))
            if numbers and generator.random() < 0.1:
                driver.engine.abort(RequestId(generator.choice(numbers)[0]))
            driver.engine.expire(now_s)
            driver.engine.step()
        driver.run()
        golden = driver.submit([7], GREEDY)
        driver.run()
        assert driver.answers[golden].token_ids == chain(7, 8)

    outcome = run(succ, script, ep_size=ep_size, kv_cache_memory=30_000)
    assert outcome.stats["expired_requests"] > 5
    assert outcome.stats["preemptions"] > 0
    for number, start in numbers:
        answer = outcome.answers[number]
        assert answer.token_ids == chain(start, len(answer.token_ids))
        assert answer.answers <= 1
        assert answer.finish_reason in ("length", "error", None)  # None: its front has gone
        assert answer.finish_reason != "error" or (answer.error and answer.error[0] == "deadline_exceeded")


# Priorities.


def test_a_lower_priority_number_is_answered_first(succ: Path) -> None:
    def script(driver: Driver) -> None:
        for number, priority in enumerate((5, 0, -3)):
            driver.submit([number], GREEDY, priority=priority)
        while not all(answer.answers for answer in driver.answers.values()):
            driver.engine.step()
            order.extend(n for n, answer in driver.answers.items() if answer.answers and n not in order)

    order: list[int] = []
    run(succ, script, max_batch_size=1)
    assert order == [2, 1, 0]


# Refusals and errors.


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31, 2**32 - 1])
@pytest.mark.parametrize(
    "name", ["prompt_token_ids", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_token_ids"]
)
def test_ids_outside_the_vocabulary_are_refused_and_those_beside_are_not_disturbed(
    succ: Path, name: str, token_id: int
) -> None:
    values: dict[str, Any] = {"logit_bias": {token_id: 1.0}, "bad_token_ids": [[1, token_id]]}
    given = {} if name == "prompt_token_ids" else {name: values.get(name, [1, token_id])}

    def script(driver: Driver) -> None:
        driver.submit([7], GREEDY)
        steps(driver, 3)
        with pytest.raises(RequestError, match=rf"{name} holds {token_id}; .* 0 to {VOCAB_SIZE - 1}") as caught:
            driver.submit([1, token_id] if name == "prompt_token_ids" else [1], TokenParams(**given))
        assert caught.value.param == name

    assert run(succ, script, ep_size=2).answers[0].token_ids == chain(7, 8)


def test_a_sequence_that_no_token_is_left_for_fails_alone(succ: Path) -> None:
    def script(driver: Driver) -> None:
        for number in range(3):
            driver.submit([number], GREEDY)
        driver.submit([3], TokenParams(temperature=0, max_tokens=8, allowed_token_ids=[4, 5], bad_token_ids=[[4], [5]]))
        driver.submit(
            [3], TokenParams(n=2, temperature=0, max_tokens=8, allowed_token_ids=[4, 5], bad_token_ids=[[5, 5], [5, 4]])
        )

    outcome = run(succ, script, ep_size=2, max_batch_size=6)
    for number, expected in ((3, []), (4, [4, 5]), (5, [4, 5])):
        answer = outcome.answers[number]
        assert (answer.token_ids, answer.finish_reason) == (expected, "error")
        assert answer.error is not None
        assert answer.error[0] == "no_token_left"
    assert [outcome.answers[n].token_ids for n in range(3)] == [chain(n, 8) for n in range(3)]
    assert outcome.stats["failed_requests"] == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_sequence_whose_logits_are_no_numbers_fails_alone(succ: Path, number: int, value: float) -> None:
    def script(driver: Driver) -> None:
        for start in range(3):
            driver.submit([start], GREEDY)
        steps(driver, 3)
        replica = driver.engine._replica
        whole = replica.run

        def broken(frame: Any) -> Any:
            reply = whole(frame)
            assert replica.logits is not None
            replica.logits = replica.logits.clone()
            replica.logits[number, 5] = value
            replica.run = whole  # type: ignore[method-assign]
            return reply

        replica.run = broken  # type: ignore[method-assign]

    outcome = run(succ, script, ep_size=2)
    for start in range(3):
        answer = outcome.answers[start]
        if start == number:
            assert (answer.token_ids, answer.error and answer.error[0]) == (chain(start, 3), "bad_logits")
        else:
            assert answer.token_ids == chain(start, 8)
