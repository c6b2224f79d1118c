# SPDX-License-Identifier: MIT OR Apache-2.0
"""The whole engine in one process, against transformers and against itself at every number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.errors import HandshakeError, LinkLost, RequestError
from metrale_ray.protocol.commands import FreeSlot, Slot
from metrale_ray.protocol.verdict import Kind
from metrale_ray.sampling.token_params import TokenParams
from tests.fixtures.tiny import FAMILIES, VOCAB_SIZE, reference, write_tiny
from tests.harness import Driver, run_engine

NEW_TOKENS = 32
GREEDY = TokenParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (1, 2, 3, 7, 16, 17, 40, 100)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def submit_all(params: TokenParams = GREEDY, many: list[list[int]] | None = None) -> Any:
    def script(driver: Driver) -> None:
        for prompt in many or prompts():
            driver.submit(prompt, params)
        driver.run()

    return script


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """The reference's greedy tokens, one prompt at a time."""
    judge = reference(model)
    return [_greedy(judge, prompt) for prompt in prompts()]


def _greedy(judge: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = judge.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else tokens equal to the padding's are masked
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("ep_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"ep_protocol": "v2"},
        {"ep_protocol": "v1"},
        {"max_num_batched_tokens": 8, "max_batch_size": 8},
        {"max_num_batched_tokens": 5, "max_batch_size": 3, "block_size": 3},
        {"max_batch_size": 8, "kv_cache_memory": 200_000, "block_size": 4},
    ],
    ids=["v2", "v1", "chunks", "small-chunks", "few-blocks"],
)
def test_tokens_are_the_references_at_every_number_of_ranks(
    model: Path, expected: list[list[int]], ep_size: int, settings: dict[str, Any]
) -> None:
    outcome = run_engine(model, submit_all(), ep_size=ep_size, max_model_len=160, **settings)
    assert outcome.head_error is None
    assert outcome.tokens() == expected
    assert {answer.finish_reason for answer in outcome.answers.values()} == {"length"}
    assert set(outcome.left.values()) <= {None}
    assert outcome.stats["free_blocks"] == outcome.stats["total_blocks"]
    if "kv_cache_memory" in settings:
        assert outcome.stats["preemptions"] > 0


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_order_in_which_ranks_run_changes_nothing(qwen: Path, seed: int) -> None:
    first = run_engine(qwen, submit_all(), ep_size=3, seed=0, max_model_len=160)
    assert run_engine(qwen, submit_all(), ep_size=3, seed=seed, max_model_len=160).tokens() == first.tokens()


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_a_seeded_draw_is_the_same_alone_in_a_batch_after_preemption_and_at_every_number_of_ranks(
    qwen: Path, ep_size: int
) -> None:
    params = TokenParams(temperature=1.3, top_k=40, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    alone = run_engine(qwen, submit_all(params, [prompts()[5]]), max_model_len=160).tokens()[0]
    together = run_engine(qwen, submit_all(params), ep_size=ep_size, max_model_len=160)
    squeezed = run_engine(
        qwen, submit_all(params), ep_size=ep_size, max_model_len=160, kv_cache_memory=200_000, block_size=4
    )
    assert squeezed.stats["preemptions"] > 0
    assert together.tokens()[5] == alone
    assert squeezed.tokens() == together.tokens()


def test_unseeded_requests_differ_from_one_another_and_not_from_run_to_run(qwen: Path) -> None:
    params = TokenParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    same = [prompts()[4]] * 4
    first = run_engine(qwen, submit_all(params, same), max_model_len=160).tokens()
    assert len({tuple(tokens) for tokens in first}) == 4
    assert run_engine(qwen, submit_all(params, same), ep_size=2, max_model_len=160).tokens() == first


def test_an_aborted_request_gets_no_more_and_leaves_nothing(qwen: Path) -> None:
    def script(driver: Driver) -> None:
        numbers = [driver.submit(prompt, GREEDY) for prompt in prompts()[:4]]
        for _ in range(5):
            driver.engine.step()
        driver.engine.abort(numbers[1])  # type: ignore[arg-type]
        seen.extend(driver.answers[numbers[1]].token_ids)
        driver.run()

    seen: list[int] = []
    everybody = run_engine(qwen, submit_all(many=prompts()[:4]), max_model_len=160)
    outcome = run_engine(qwen, script, ep_size=2, max_model_len=160)
    assert outcome.answers[1].token_ids == seen
    assert outcome.answers[1].answers == 0
    assert [outcome.answers[n].token_ids for n in (0, 2, 3)] == [everybody.answers[n].token_ids for n in (0, 2, 3)]
    assert outcome.stats["free_blocks"] == outcome.stats["total_blocks"]


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([], "empty_prompt"), ([1] * 161, "context_length_exceeded"), ([1, VOCAB_SIZE], "invalid_request")],
    ids=["empty", "too-long", "outside-the-vocabulary"],
)
def test_a_prompt_that_can_never_be_served_is_refused_at_once_and_others_go_on(
    qwen: Path, prompt: list[int], code: str
) -> None:
    def script(driver: Driver) -> None:
        driver.submit(prompts()[3], GREEDY)
        with pytest.raises(RequestError) as caught:
            driver.submit(prompt, GREEDY)
        codes.append(caught.value.code)
        driver.run()

    codes: list[str] = []
    outcome = run_engine(qwen, script, ep_size=2, max_model_len=160)
    assert codes == [code]
    assert outcome.answers[0].finish_reason == "length"


def test_a_stop_token_ends_the_text_and_is_named(qwen: Path) -> None:
    whole = run_engine(qwen, submit_all(many=[prompts()[3]]), max_model_len=160).tokens()[0]
    stop = whole[5]

    def script(driver: Driver) -> None:
        driver.submit(prompts()[3], TokenParams(temperature=0, max_tokens=32, stop_token_ids=(stop,)))
        driver.run()

    answer = run_engine(qwen, script, ep_size=2, max_model_len=160).answers[0]
    assert answer.finish_reason == "stop"
    assert answer.token_ids == whole[: whole.index(stop) + 1]


def test_what_every_rank_refuses_is_rejected_and_the_engine_goes_on(qwen: Path) -> None:
    def script(driver: Driver) -> None:
        verdicts.append(driver.engine._orders.run(FreeSlot(Slot(3))))
        submit_all(many=prompts()[:2])(driver)

    verdicts: list[Any] = []
    outcome = run_engine(qwen, script, ep_size=3, max_model_len=160)
    assert (verdicts[0].kind, verdicts[0].slots) == (Kind.REJECTED, (3,))
    assert "slot 3 is free already" in verdicts[0].message
    assert outcome.head_error is None
    assert {answer.finish_reason for answer in outcome.answers.values()} == {"length"}


def test_ranks_that_differ_are_refused_and_every_rank_is_told_each_difference(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metrale_ray.model import ranks

    plain = ranks.introduce
    monkeypatch.setattr("metrale_ray.worker.introduce", lambda setup: _altered(plain(setup), setup.rank))
    outcome = run_engine(qwen, submit_all(), ep_size=3, max_model_len=160)
    for error in (outcome.head_error, *outcome.left.values()):
        assert isinstance(error, HandshakeError)
        assert "threads: rank 0 has '1', rank 1 on memory has '7'" in error.message
        assert "build: rank 0 has" in error.message


def _altered(hello: Any, rank: int) -> Any:
    import dataclasses

    changed = {1: {"threads": "7"}, 2: {"build": "another"}}[rank]
    return dataclasses.replace(hello, must_equal={**hello.must_equal, **changed})


def test_a_worker_that_leaves_is_a_lost_link_naming_its_rank(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from metrale_ray.model.contract import ep

    def leave(self: Any, replica: Any) -> bool:
        frame = self._required_port().receive()
        if frame.envelope.seq == 4 and replica.rank == 2:
            raise RuntimeError("this rank is gone")
        reply = replica.run(frame)
        self._required_port().reply(reply)
        return True

    monkeypatch.setattr(ep.Ep, "ep_worker_step", leave)
    outcome = run_engine(qwen, submit_all(), ep_size=3, max_model_len=160)
    assert isinstance(outcome.head_error, LinkLost)
    assert outcome.head_error.rank == 2
    assert isinstance(outcome.left["rank 2"], RuntimeError)
    assert isinstance(outcome.left["rank 1"], LinkLost)
