# SPDX-License-Identifier: MIT OR Apache-2.0
"""Top-k, top-p and the draw on one row, against full sorts and sums one after another."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.sampling.processors import Floats, candidates, draw_index, top_k_ids, top_p_indices, weights
from metrale_ray.sampling.token_params import TokenParams

INF = math.inf

# Few distinct values, so that ties are common; masked and huge ones among them.
LOGIT = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, -INF, -INF, 3e38, -3e38]),
    st.floats(-30, 30, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
LOGITS = st.lists(LOGIT, min_size=1, max_size=40).filter(lambda values: max(values) > -INF)


def floats(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float32)


def large_rows(vocab_size: int = 20_011) -> list[Floats]:
    """Rows of very different shapes: flat, steep, with many ties, with a few finite ones, all equal."""
    random = np.random.default_rng(5)
    normal = random.standard_normal(vocab_size)
    masked = np.where(random.random(vocab_size) < 0.999, -np.inf, normal)
    rows = [normal, 8 * normal, 1e-3 * normal, np.round(2 * normal), masked, np.zeros(vocab_size), np.sort(normal)]
    return [row.astype(np.float32) for row in rows]


@given(LOGITS, st.data())
def test_top_k_keeps_exactly_the_first_of_a_full_stable_sort(logits: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(logits)))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert top_k_ids(floats(logits), top_k).tolist() == sorted(order[:top_k])


@pytest.mark.parametrize("top_k", [1, 2, 20, 50, 155, 156, 157, 1000, 20_010, 20_011])
def test_top_k_agrees_with_a_full_sort_over_a_large_vocabulary(top_k: int) -> None:
    for logits_V in large_rows():
        order = np.argsort(-logits_V, kind="stable")
        assert np.array_equal(top_k_ids(logits_V, top_k), np.sort(order[:top_k]))


@given(LOGITS, st.floats(0.01, 100), st.floats(5e-324, 1.0, exclude_max=True))
def test_top_p_keeps_the_smallest_set_of_largest_weights_that_reaches_the_share(
    logits: list[float], temperature: float, top_p: float
) -> None:
    logits_V = floats(logits)
    weights_C = weights(logits_V, float(logits_V.max()), temperature)
    kept = top_p_indices(weights_C, top_p).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-weights_C[i].item(), i))
    assert kept == sorted(order[: len(kept)])
    assert len(kept) >= 1
    total, share = weights_C.sum(dtype=np.float64), weights_C[order].cumsum(dtype=np.float64)
    assert share[len(kept) - 1] >= (top_p - 1e-12) * total
    assert len(kept) == 1 or share[len(kept) - 2] < (top_p + 1e-12) * total


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999999, 1 - 2**-53])
def test_top_p_agrees_with_a_full_sort_over_a_large_vocabulary(top_p: float) -> None:
    for logits_V in large_rows():
        weights_V = weights(logits_V, float(logits_V.max()), 1.0)
        order = np.argsort(-weights_V, kind="stable")
        sums = weights_V[order].cumsum(dtype=np.float64)
        count = min(int(np.count_nonzero(sums < float(sums[-1]) * top_p)) + 1, weights_V.size)
        kept = top_p_indices(weights_V, top_p)
        # Sums of 20 000 floats in two orders may put the cut a token or two apart; what has no weight may stay or go.
        num_weighty = np.count_nonzero(weights_V[kept] > 1e-15)
        assert abs(num_weighty - min(count, np.count_nonzero(weights_V > 1e-15))) <= 2
        assert np.array_equal(kept, np.sort(order[: kept.size]))


@given(LOGITS, st.floats(0.01, 100), st.one_of(st.floats(0, 1, exclude_min=True), st.floats(1e-40, 1e-25)))
def test_min_p_keeps_the_weights_that_reach_it_however_they_are_found(
    logits: list[float], temperature: float, min_p: float
) -> None:
    logits_V = floats(logits)
    peak = float(logits_V.max())
    weights_V = weights(logits_V, peak, temperature)
    ids_C, weights_C = candidates(logits_V, peak, TokenParams(temperature=temperature, min_p=min_p))
    expected = [i for i, weight in enumerate(weights_V) if weight >= np.float32(min_p)]
    assert ids_C is not None
    assert ids_C.tolist() == expected
    assert weights_C.tolist() == weights_V[expected].tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_min_p_loses_no_token_at_the_border(temperature: float) -> None:
    for min_p in (1e-29, 1e-10, 0.02, 0.5, 0.999, 1.0):
        middle = temperature * math.log(min_p)
        near_V = (middle + np.linspace(-1, 1, 4001) * (0.1 - 0.1 * middle)).astype(np.float32)
        logits_V = 40 + np.append(np.minimum(near_V, 0), np.float32(0))
        weights_V = weights(logits_V, 40.0, temperature)
        ids_C, _ = candidates(logits_V, 40.0, TokenParams(temperature=temperature, min_p=min_p))
        assert ids_C is not None
        assert np.array_equal(ids_C, np.flatnonzero(weights_V >= np.float32(min_p)))
        assert 0 < ids_C.size < logits_V.size


def test_without_limits_every_token_is_a_candidate_and_nothing_is_gathered() -> None:
    for top_k in (0, 3, 2**32 - 1):
        ids_C, weights_C = candidates(floats([1.0, 3.0, 2.0]), 3.0, TokenParams(top_k=top_k))
        assert ids_C is None
        assert weights_C.tolist() == torch.tensor([-2.0, 0.0, -1.0]).exp().tolist()


def test_a_weight_has_the_same_bits_at_every_place_and_alignment() -> None:
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32) * 10
    expected = weights(values, 30.0, 0.7)
    room = np.empty(1100, dtype=np.float32)
    for offset in range(70):
        room[offset : offset + 1000] = values
        assert np.array_equal(weights(room[offset : offset + 1000], 30.0, 0.7), expected)
    one_by_one = [weights(values[i : i + 1].copy(), 30.0, 0.7)[0] for i in range(1000)]
    assert np.array_equal(np.array(one_by_one), expected)


WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(0, 1, width=32)), min_size=1, max_size=40).filter(any)


@given(WEIGHTS, st.integers(0, 2**53 - 1), st.integers(0, 3000))
def test_a_draw_meets_the_weight_on_which_it_falls(values: list[float], bits: int, num_before: int) -> None:
    # Zeros before it move the weights over the borders of the blocks; they are never met.
    index = draw_index(floats([0.0] * num_before + values), bits / 2**53)
    exact = [Fraction(value) for value in values]
    target, place = Fraction(bits, 2**53) * sum(exact), index - num_before
    assert place >= 0
    assert values[place] > 0
    slack = Fraction(1, 10**14) * sum(exact)
    assert sum(exact[:place]) - slack <= target <= sum(exact[: place + 1]) + slack


def test_draws_over_many_blocks_agree_with_one_long_sum() -> None:
    random = np.random.default_rng(8)
    for size in (1, 2, 1023, 1024, 1025, 5000):
        weights_C = random.random(size).astype(np.float32)
        sums = weights_C.cumsum(dtype=np.float64)
        for uniform in random.random(200).tolist():
            assert draw_index(weights_C, uniform) == sums.searchsorted(uniform * sums[-1], side="right")


def test_the_largest_draw_meets_the_last_weight_even_when_its_block_sums_to_less_one_by_one() -> None:
    random = np.random.default_rng(8)
    largest, num_between = 1 - 2**-53, 0
    for _ in range(200):
        # Sums of weights of one size are exact in fp64; those of very different ones round.
        weights_C = np.append(np.exp(-40 * random.random(900)), np.zeros(50)).astype(np.float32)
        total = float(weights_C.sum(dtype=np.float64))
        is_between = weights_C.cumsum(dtype=np.float64)[-1] <= largest * total
        num_between += is_between
        index = draw_index(weights_C, largest)
        assert index == 899 if is_between else weights_C[index] > 0
    assert num_between > 0, "no sum has rounded down, so the test tells nothing"
