# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention split over the ranks: the whole model against transformers, for every family and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.config import FaultSpec
from metrale_ray.errors import Desync
from metrale_ray.model.dense_share import dense_share, even_part
from metrale_ray.model.scrubbing import Scrubbing
from metrale_ray.native.library import library, why_not
from metrale_ray.protocol.commands import Logits, Slot
from tests.fixtures.group import Group
from tests.fixtures.tiny import VOCAB_SIZE, random_prompt, reference_greedy, reference_logits
from tests.harness import Driver, run_engine
from tests.model.test_transformer import error

LIMIT = 2e-5  # the promise is 1e-4
WORLDS = (2, 3, 4)
# 4 query heads over 2 kv heads: of 3 and 4 ranks some have no heads.
VARIANTS = (
    "mixtral",
    "mixtral, window",
    "mixtral, one kv head",
    "qwen3",
    "qwen3, mixed layers",
    "qwen3, tied",
    "qwen3, biases",
    "qwen3, window",
    "qwen3, all dense",
    "llama",
    "llama, no kv heads",
    "llama, tied",
    "llama, attention biases",
    "llama, mlp biases",
    "dense qwen3",
    "dense qwen3, tied",
    "dense qwen3, window in listed layers",
)
TINY = Callable[[str], Path]
REFERENCE = Callable[[str], Any]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference_in_one_pass_and_in_chunks(
    variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group, model = Group(tiny(variant), world, is_split=True), tiny_reference(variant)
    for slot, (length, chunk) in enumerate(((1, None), (33, None), (33, 5))):
        prompt = random_prompt(length)
        assert error(group.prompt(slot, prompt, chunk), reference_logits(model, prompt)) < LIMIT


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("variant", ["qwen3", "qwen3, mixed layers", "llama, tied"])
def test_decode_rows_and_chunks_run_in_one_pass_and_logits_come_in_the_order_of_the_rows(
    variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group, model = Group(tiny(variant), world, is_split=True), tiny_reference(variant)
    first, second, third = (random_prompt(n) for n in (12, 30, 21))
    assert group.step((0, first[:-1], Logits.NONE), (1, second[:10], Logits.NONE)).shape == (0, VOCAB_SIZE)
    got = group.step((2, third, Logits.LAST), (0, first[-1:], Logits.LAST), (1, second[10:], Logits.ALL))
    want = [reference_logits(model, prompt) for prompt in (third, first, second)]
    assert error(got, torch.cat((want[0][-1:], want[1][-1:], want[2][10:]))) < LIMIT


@pytest.mark.parametrize(("variant", "world"), [("qwen3", 2), ("mixtral, window", 3), ("llama, mlp biases", 4)])
def test_32_greedy_tokens_equal_the_reference(variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE) -> None:
    prompt = random_prompt(9)
    expected = reference_greedy(tiny_reference(variant), prompt, 32)
    assert Group(tiny(variant), world, is_split=True).greedy(0, prompt, 32) == expected


@pytest.mark.skipif(library() is None, reason=why_not())
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("variant", ["qwen3", "llama, mlp biases", "qwen3, tied"])
def test_native_kernels_with_packed_shares_give_the_same(
    variant: str, world: int, tiny: TINY, tiny_reference: REFERENCE
) -> None:
    group, prompt = Group(tiny(variant), world, is_split=True, kernels="native", block_size=16), random_prompt(40)
    assert error(group.prompt(0, prompt, 16), reference_logits(tiny_reference(variant), prompt)) < LIMIT


def test_every_rank_enters_as_many_collectives_as_it_announces(tiny: TINY) -> None:
    for variant, count in (("mixtral", 7), ("qwen3, mixed layers", 13), ("llama", 7)):
        group = Group(tiny(variant), 3, is_split=True)
        for logits in (Logits.NONE, Logits.ALL):
            group.step((0, random_prompt(3), logits))
            assert [model.num_reductions() for model in group.models] == [count] * 3
            assert [model._collectives._remaining for model in group.models] == [0] * 3
            assert [model._collectives._rows_to_gather for model in group.models] == [0] * 3


def test_hidden_states_have_the_same_bits_on_every_rank(tiny: TINY, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tiny("qwen3"), 3, is_split=True)
    seen: list[torch.Tensor] = []
    for model in group.models:
        hidden = model._decoder.hidden
        monkeypatch.setattr(model._decoder, "hidden", lambda step, run=hidden: seen.append(run(step)) or seen[-1])
    group.prompt(0, random_prompt(20))
    assert len(seen) == 3
    assert all(torch.equal(other, seen[0]) for other in seen)


def test_heads_follow_their_keys_and_values_and_every_item_is_on_one_rank(tiny: TINY) -> None:
    decoder = replace(Group(tiny("qwen3")).models[0].decoder_config, num_heads=8, num_kv_heads=4)
    shares = [dense_share(decoder, rank, 3, is_split=True) for rank in range(3)]
    assert [(len(share.kv_heads), len(share.heads)) for share in shares] == [(2, 4), (1, 2), (1, 2)]
    for total in (1, 5, 320, 4096, 151_936):
        for world in (1, 2, 3, 7):
            parts = [even_part(total, rank, world) for rank in range(world)]
            assert [item for part in parts for item in (part.start, part.stop)][1:-1:2] == [p.start for p in parts[1:]]
            assert (parts[0].start, parts[-1].stop) == (0, total)
            assert len(parts[0]) == max(map(len, parts)) <= total / world * 1.125 + 1


SETTINGS: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 64}
PROMPTS = [[11, *range(20, 31)], [12, 50, 51], [13, *range(60, 68)], [0, 80]]


def ask(driver: Driver) -> None:
    for prompt in PROMPTS:
        driver.submit(prompt)
    driver.run()


@pytest.mark.parametrize("ep_size", WORLDS)
def test_an_engine_gives_the_tokens_of_one_rank_and_raises_no_alarm(tiny: TINY, ep_size: int) -> None:
    one = run_engine(tiny("qwen3"), ask, **SETTINGS)
    settings = {"attention": "tensor", "agreement_interval": 1, "scrub": True, **SETTINGS}
    many = run_engine(tiny("qwen3"), ask_and_scrub, ep_size=ep_size, **settings)
    assert many.head_error is None
    assert many.tokens() == one.tokens()


def ask_and_scrub(driver: Driver) -> None:
    for prompt in PROMPTS:
        driver.submit(prompt)
    driver.engine.step()
    driver.engine._orders.run(Scrubbing(1).next({Slot(0): 1}))
    driver.run()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", ["before", "inside", "after"])
def test_a_rank_that_fails_at_any_collective_fails_only_that_step_and_no_rank_waits(
    tiny: TINY, rank: int, phase: Any
) -> None:
    """The last one of a step, number 7, is the gather. Each fault fails the sequence that begins with token 11."""
    good = run_engine(tiny("qwen3"), ask, **SETTINGS).tokens()
    for layer in (0, 1, 6, 7):
        fault = FaultSpec(rank, phase, "fail", layer=layer, first_token=11, blame=True)
        outcome = run_engine(tiny("qwen3"), ask, ep_size=3, attention="tensor", faults=(fault,), **SETTINGS)
        assert outcome.head_error is None, (layer, outcome.head_error)
        assert outcome.answers[0].finish_reason == "error"
        assert [outcome.answers[number].token_ids for number in (1, 2, 3)] == good[1:]


@pytest.mark.parametrize(
    ("rank", "tensor"), [(1, "embedding"), (0, "head"), (2, "layers.1.down"), (1, "layers.0.qkv"), (1, "final_norm")]
)
def test_a_flipped_weight_of_a_share_is_found_by_a_scrub(tiny: TINY, rank: int, tensor: str) -> None:
    def scrub(driver: Driver) -> None:
        driver.engine._orders.run(Scrubbing(1).next({}))

    fault = FaultSpec(rank, "validation", "flip_weight", command=2, cmd="scrub", tensor=tensor)
    settings = {"attention": "tensor", "scrub": True, **SETTINGS}
    outcome = run_engine(tiny("qwen3, all dense"), scrub, ep_size=3, faults=(fault,), **settings)
    assert isinstance(outcome.head_error, Desync)
    assert (outcome.head_error.rank, outcome.head_error.field) == (rank, tensor)
