# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sampler against a plain reference with a full sort, alone and in batches, and against the distribution itself."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.philox import draw
from metrale_ray.sampling.processors import top_k_ids, top_p_mask, weights
from metrale_ray.sampling.sampler import SampleError, SampleRow, sample

INF = math.inf


class Undecided(Exception):
    """A running sum meets top_p so closely that sums in floats may fall on either side."""


def row(position: int = 0, *, seed: int = 1, sequence_index: int = 0, **params: float) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, sequence_index, position)  # type: ignore[arg-type]


def reference_weights(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The weight of each token that is left, by a full sort; ids ascending."""
    logits_V = torch.tensor(logits)
    order = sorted(range(len(logits)), key=lambda i: (-logits_V[i].item(), i))
    if params.top_k:
        order = order[: params.top_k]
    ids_C = torch.tensor(sorted(order))
    values_C = torch.exp((logits_V[ids_C] - logits_V.max()) / params.temperature)
    weight = dict(zip(ids_C.tolist(), values_C.tolist(), strict=True))
    if params.top_p < 1:
        order = sorted(weight, key=lambda i: (-weight[i], i))
        wanted, total, kept = sum(map(Fraction, weight.values())) * Fraction(params.top_p), Fraction(0), []
        for token_id in order:
            if kept and total >= wanted:
                break
            kept.append(token_id)
            total += Fraction(weight[token_id])
            if abs(total - wanted) <= Fraction(1, 10**12):
                raise Undecided
        weight = {i: weight[i] for i in sorted(kept)}
    return weight


def reference_token(logits: list[float], one: SampleRow) -> int:
    if one.params.is_greedy:
        return logits.index(max(logits))
    weight = reference_weights(logits, one.params)
    target = draw(one.seed, one.sequence_index, one.position) * math.fsum(weight.values())
    running = 0.0
    for token_id, value in weight.items():
        running += value
        if running > target:
            return token_id
    raise AssertionError("the draw is below the total")


# Few distinct values, so that ties are common; masked and huge ones among them.
LOGIT = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, -INF, -INF, 3e38, -3e38]),
    st.floats(-30, 30, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
LOGITS = st.lists(LOGIT, min_size=1, max_size=40).filter(lambda values: max(values) > -INF)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.0, 0.7, 1.0, 100.0]), st.floats(0.01, 5)),
    top_k=st.sampled_from([0, 1, 2, 3, 10, 10**6]),
    top_p=st.one_of(st.sampled_from([1.0, 0.9, 0.37]), st.floats(1e-300, 1.0)),
)
ROW = st.builds(SampleRow, PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(0, 2**40))


@given(LOGITS, ROW)
def test_a_token_is_the_one_that_the_plain_reference_takes(logits: list[float], one: SampleRow) -> None:
    try:
        expected = reference_token(logits, one)
    except Undecided:
        reject()
    assert sample(torch.tensor([logits]), [one]) == [expected]


@given(LOGITS, st.data())
def test_top_k_keeps_exactly_the_first_of_a_full_stable_sort(logits: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(logits)))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert top_k_ids(torch.tensor(logits), top_k).tolist() == sorted(order[:top_k])


@given(LOGITS, st.floats(0.01, 100), st.floats(5e-324, 1.0, exclude_max=True))
def test_top_p_keeps_the_smallest_set_of_largest_weights_that_reaches_the_share(
    logits: list[float], temperature: float, top_p: float
) -> None:
    weights_C = weights(torch.tensor(logits), temperature)
    kept = top_p_mask(weights_C, top_p).nonzero().flatten().tolist()
    order = sorted(range(len(logits)), key=lambda i: (-weights_C[i].item(), i))
    assert kept == sorted(order[: len(kept)])
    assert len(kept) >= 1
    total, share = weights_C.double().sum().item(), weights_C[order].double().cumsum(0)
    assert share[len(kept) - 1] >= (top_p - 1e-12) * total
    assert len(kept) == 1 or share[len(kept) - 2] < (top_p + 1e-12) * total


def test_top_p_agrees_with_a_full_sort_over_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(5)
    for spread in (0.0, 1e-3, 1.0, 8.0):
        weights_V = weights(torch.randn(50_000, generator=generator) * spread, 1.0)
        for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999999):
            values, order = weights_V.double().sort(descending=True, stable=True)
            sums = values.cumsum(0)
            count = int((sums < float(sums[-1]) * top_p).sum()) + 1
            kept = top_p_mask(weights_V, top_p).nonzero().flatten()
            # Sums of 50 000 floats in two orders may put the cut one token apart.
            assert abs(kept.numel() - count) <= 1
            assert torch.equal(kept, order[: kept.numel()].sort().values)


@given(st.data())
def test_a_row_gives_the_same_token_alone_and_at_any_place_of_any_batch(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 70))
    batch = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits_RV = torch.randn(batch, vocab_size, generator=generator) * 3
    rows = [data.draw(ROW) for _ in range(batch)]
    together = sample(logits_RV, rows)
    alone = [sample(logits_RV[r : r + 1].clone(), [rows[r]])[0] for r in range(batch)]
    order = data.draw(st.permutations(range(batch)))
    shuffled = sample(logits_RV[list(order)], [rows[r] for r in order])
    assert together == alone
    assert shuffled == [together[r] for r in order]


def test_a_row_gives_the_same_token_in_a_batch_over_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(9)
    logits_RV = torch.randn(9, 32_003, generator=generator)  # odd, so that rows start at every alignment
    rows = [row(position, top_p=1.0 if position % 2 else 0.99) for position in range(9)]
    together = sample(logits_RV, rows)
    assert together == [sample(logits_RV[r : r + 1].clone(), [rows[r]])[0] for r in range(9)]
    assert together == sample(torch.randn(9, 2 * 32_003).new_empty(9, 2 * 32_003)[:, ::2].copy_(logits_RV), rows)


def test_greedy_takes_the_first_index_on_a_tie() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-INF, -INF, -0.0, 0.0]])
    assert sample(logits_RV, [row(temperature=0)] * 3) == [1, 0, 2]


def test_top_k_of_one_and_a_tiny_top_p_are_the_greedy_choice_on_ties_too() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).repeat(100, 1)
    assert sample(logits_RV, [row(p, top_k=1) for p in range(100)]) == [1] * 100
    assert sample(logits_RV, [row(p, top_p=1e-300) for p in range(100)]) == [1] * 100


def test_a_temperature_too_small_for_fp32_is_the_greedy_choice() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits_RV, [row(temperature=1e-320)]) == [1]
    assert sample(logits_RV, [row(temperature=2.0**-126)]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[math.nan, 1.0, 2.0], [1.0, 2.0, math.nan], [-INF, math.nan, -INF], [-INF] * 3, [0.0, INF, 1.0]]
)
def test_a_row_that_is_not_finite_fails_alone(bad: list[float], temperature: float) -> None:
    good = [0.5, -INF, 4.0]
    rows = [row(p, temperature=temperature) for p in range(3)]
    results = sample(torch.tensor([good, bad, good]), rows)
    expected = sample(torch.tensor([good, good]), [rows[0], rows[2]])
    assert [results[0], results[2]] == expected
    assert results[1] == SampleError("bad_logits", "the logits of position 1 are not finite numbers")
    assert str(results[1]) == "the logits of position 1 are not finite numbers"


def test_a_masked_token_is_never_drawn() -> None:
    logits_RV = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]]).repeat(200, 1)
    assert set(sample(logits_RV, [row(p, temperature=100.0) for p in range(200)])) == {1, 3}


def test_huge_logits_do_not_overflow() -> None:
    logits_RV = torch.tensor([[3.4e38, -3.4e38, 3.4e38]]).repeat(50, 1)
    assert set(sample(logits_RV, [row(p) for p in range(50)])) == {0, 2}


def test_the_logits_are_left_as_they_were() -> None:
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    before = logits_RV.clone()
    sample(logits_RV, [row(p, top_k=5, top_p=0.5, temperature=t) for p, t in enumerate((0.0, 0.5, 2.0))])
    assert torch.equal(before, logits_RV)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize(
    ("logits_RV", "num_rows"),
    [
        (torch.zeros(2, 4), 1),
        (torch.zeros(4), 4),
        (torch.zeros(1, 0), 1),
        (torch.zeros(1, 4, dtype=torch.bfloat16), 1),
        (torch.zeros(1, 4, dtype=torch.float64), 1),
    ],
)
def test_logits_of_a_wrong_shape_or_dtype_are_refused(logits_RV: torch.Tensor, num_rows: int) -> None:
    with pytest.raises(ValueError, match="logits"):
        sample(logits_RV, [row()] * num_rows)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9),
    ],
    ids=str,
)
def test_the_tokens_follow_the_distribution(params: SamplingParams, scale: int) -> None:
    num_draws = 5_000 * scale
    logits = [0.3 * i - 0.02 * i * i for i in range(12)]
    weight = reference_weights(logits, params)
    counts = dict.fromkeys(weight, 0)
    logits_RV = torch.tensor([logits]).expand(num_draws, -1)
    for token in sample(logits_RV, [SampleRow(params, 77, 0, position) for position in range(num_draws)]):
        counts[token] += 1  # type: ignore[index]  # a SampleError or a token that was cut fails here
    total = sum(weight.values())
    chi_square = sum((counts[i] - num_draws * w / total) ** 2 / (num_draws * w / total) for i, w in weight.items())
    freedom = len(weight) - 1
    assert freedom >= 4
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)
