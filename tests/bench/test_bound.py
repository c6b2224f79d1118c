# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.bound import BF16_BYTES, Layout, distinct_experts, expert_bytes, slowest_experts, step_bytes
from bench.model import SIZES

HIDDEN, LAYERS, VOCAB = SIZES["hidden_size"], SIZES["num_hidden_layers"], SIZES["vocab_size"]
ALL_EXPERTS = SIZES["num_experts"]


def test_one_token_reads_the_experts_it_chose_and_everything_else_once() -> None:
    attention = 2 * (16 + 4) * 64 * HIDDEN  # queries and output, keys and values
    router = ALL_EXPERTS * HIDDEN
    experts = 8 * 3 * 384 * HIDDEN
    cache = 2 * 4 * 64 * 100
    wanted = BF16_BYTES * (LAYERS * (attention + router + experts + cache) + VOCAB * HIDDEN)
    assert step_bytes(Layout(), 1, 100) == wanted


@given(st.integers(1, 200))
def test_a_batch_reads_no_more_experts_than_its_tokens_choose_or_there_are(batch: int) -> None:
    assert 8 <= distinct_experts(batch) <= min(8 * batch, ALL_EXPERTS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 32])
def test_the_slowest_rank_has_at_least_its_share_of_the_experts(ranks: int, batch: int) -> None:
    most = -(-ALL_EXPERTS // ranks)
    assert distinct_experts(batch) / ranks - 0.1 <= slowest_experts(ranks, batch) <= min(most, distinct_experts(batch))


def test_one_token_on_two_ranks_waits_for_more_than_half_of_its_experts() -> None:
    assert 4.9 < slowest_experts(2, 1) < 5.2  # the larger part of 8 out of 32 and 32: 5.03 on the average


def test_measured_experts_take_the_place_of_random_ones_on_every_layout() -> None:
    plain = step_bytes(Layout(), 8, 100) - step_bytes(Layout(), 8, 100, distinct=distinct_experts(8) - 1)
    assert plain == pytest.approx(LAYERS * expert_bytes(Layout()))
    assert slowest_experts(2, 8, distinct_experts(8) / 2) == pytest.approx(slowest_experts(2, 8) / 2)


def test_splitting_attention_halves_all_but_routers_and_experts() -> None:
    whole, split = step_bytes(Layout(2), 8, 100), step_bytes(Layout(2, True), 8, 100)
    attention = 2 * (16 + 4) * 64 * HIDDEN + 2 * 4 * 64 * 100 * 8
    assert whole - split == BF16_BYTES * (LAYERS * attention + VOCAB * HIDDEN) / 2


def test_int8_reads_half_of_an_expert_and_its_scales() -> None:
    assert expert_bytes(Layout(is_int8=True)) == expert_bytes(Layout()) / 2 + 4 * (2 * 384 + HIDDEN)
