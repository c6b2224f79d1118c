# SPDX-License-Identifier: MIT OR Apache-2.0
"""What native kernels do with each row by itself, against PyTorch's: norms, rotations, the choice of experts."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.decoder_config import MoeConfig, RopeConfig
from metrale_ray.model.experts.router import route
from metrale_ray.model.kernels.buffers import rows_of
from metrale_ray.model.kernels.layout import packed
from metrale_ray.model.kernels.torch_kernels import TorchKernels
from metrale_ray.model.layers.rotary import Rotary
from tests.model.kernels.reference import CPU, DTYPES, native, numbers
from tests.native.instructions import fewer_examples, needs_core, on_each_set, running

pytestmark = needs_core
dtypes = st.sampled_from(DTYPES)
row_counts = st.integers(1, 40)
seeds = st.integers(0, 1000)
threads = st.integers(1, 3)
EPS = 1e-6


def assert_rounded(got: torch.Tensor, want: torch.Tensor, roundings: int) -> None:
    """Equal, but for so many roundings that may have gone the other way."""
    relative = roundings * 2**-8 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), want.float(), rtol=relative, atol=relative, equal_nan=True)


@on_each_set
@fewer_examples
@given(dtypes, row_counts, st.integers(1, 70), seeds, threads)
def test_norms_give_what_pytorch_gives(
    instructions: str, dtype: torch.dtype, rows: int, width: int, seed: int, threads: int
) -> None:
    x, weight = numbers(seed, (rows, width), (width,), dtype=dtype)
    with running(instructions):
        got = native(dtype, threads).norm(weight, EPS)(x)
    assert_rounded(got, TorchKernels(CPU, dtype).norm(weight, EPS)(x), 2)


@on_each_set
@fewer_examples
@given(dtypes, row_counts, st.integers(1, 35), st.integers(1, 5), st.integers(0, 3), st.booleans(), seeds, threads)
def test_rotations_give_what_pytorch_gives(
    instructions: str,
    dtype: torch.dtype,
    rows: int,
    half_dim: int,
    rotated: int,
    others: int,
    has_norm: bool,
    seed: int,
    threads: int,
) -> None:
    dim = 2 * half_dim
    qkv, norms = numbers(seed, (rows, rotated + others, dim), (rotated, dim), dtype=dtype)
    angles = Rotary(RopeConfig("default", 10_000.0), dim, CPU, dtype).angles(torch.arange(seed, seed + rows))
    arguments = (norms if has_norm else None, EPS, rotated, dim)
    want = TorchKernels(CPU, dtype).rotation(*arguments)(qkv.clone(), *angles)
    with running(instructions):
        got = native(dtype, threads).rotation(*arguments)(qkv.clone(), *angles)
    # In bfloat16 PyTorch rounds each product before they are added.
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0.1 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(got[:, rotated:], qkv[:, rotated:])


@on_each_set
@fewer_examples
@given(dtypes, row_counts, st.integers(1, 70), st.integers(1, 8), st.booleans(), st.booleans(), seeds, threads)
def test_the_router_chooses_what_pytorch_chooses(
    instructions: str,
    dtype: torch.dtype,
    rows: int,
    experts: int,
    per_token: int,
    normalize: bool,
    rounds: bool,
    seed: int,
    threads: int,
) -> None:
    """Scores are few whole numbers, so that both sum alike and ties are many: the lower number comes first."""
    moe = MoeConfig(experts, min(per_token, experts), 1, normalize, rounds)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (rows, experts), generator=generator).to(dtype)
    chosen, weights = _route(instructions, scores, moe, threads)
    want_chosen, want_weights = route(scores, moe)
    assert torch.equal(chosen.long(), want_chosen)
    assert_rounded(weights.to(dtype) if rounds else weights, want_weights, 1)
    if rounds:
        assert torch.equal(weights, weights.to(dtype).float())


@on_each_set
def test_scores_that_are_no_numbers_give_weights_that_are_none(instructions: str) -> None:
    scores = torch.zeros(6, 20)
    scores[0, 3] = scores[1, 0] = scores[2, 19] = math.nan
    scores[3, 5] = math.inf
    scores[4] = -math.inf
    moe = MoeConfig(20, 3, 1, True, False)
    chosen, weights = _route(instructions, scores, moe, 1)
    want_chosen, want_weights = route(scores, moe)
    assert torch.equal(chosen.long(), want_chosen)
    torch.testing.assert_close(weights, want_weights, equal_nan=True)
    assert weights[:5].isnan().all()


def _route(instructions: str, scores: torch.Tensor, moe: MoeConfig, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice alone, without the product that gives the scores."""
    core = native(scores.dtype, threads)
    chosen = torch.full((len(scores), moe.experts_per_token), -1, dtype=torch.int32)
    weights = torch.full(chosen.shape, -1.0)
    with running(instructions):
        core.core.mr_route(
            rows_of(scores),
            moe.num_experts,
            moe.experts_per_token,
            moe.normalize_weights,
            moe.round_weights,
            chosen.data_ptr(),
            weights.data_ptr(),
            threads,
        )
    return chosen, weights


@on_each_set
@fewer_examples
@given(dtypes, st.integers(1, 20), st.integers(1, 40), st.integers(1, 40), seeds)
def test_a_router_is_its_matrix_and_then_the_choice(
    instructions: str, dtype: torch.dtype, rows: int, hidden: int, experts: int, seed: int
) -> None:
    moe = MoeConfig(experts, min(4, experts), 1, True, False)
    x, weight = numbers(seed, (rows, hidden), (experts, hidden), dtype=dtype)
    with running(instructions):
        kernels = native(dtype)
        scores = kernels.linear(packed(weight), (experts, hidden))(x).clone()
        chosen, weights = kernels.router(packed(weight), hidden, moe)(x)
    want_chosen, want_weights = route(scores, moe)
    assert torch.equal(chosen.long(), want_chosen)
    assert_rounded(weights, want_weights, 1)
