# SPDX-License-Identifier: MIT OR Apache-2.0
"""Native experts and dense mlps against PyTorch's."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.experts.local import plain_experts
from metrale_ray.model.kernels.kernels import GatedMlp, LocalExperts
from metrale_ray.model.kernels.layout import packed
from metrale_ray.model.layers.activation import ACTIVATIONS
from tests.model.kernels.reference import DTYPES, PLAIN, assert_close, native, numbers
from tests.native.instructions import MIN_TILE_ROWS, TILED, fewer_examples, needs_core, on_each_set, running

pytestmark = needs_core


@dataclass(frozen=True)
class Case:
    """Experts of one rank, and a step's tokens with the experts that were chosen for them."""

    dtype: torch.dtype
    x: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    mine: range
    gate_up: torch.Tensor  # [L, 2·I, H]
    down: torch.Tensor
    num_experts: int
    activation: str

    def experts(self, threads: int = 1) -> LocalExperts:
        """The native ones."""
        _, two_inner, hidden = self.gate_up.shape
        moe = MoeConfig(self.num_experts, self.chosen.shape[1], two_inner // 2, False, False)
        halves = self.gate_up.reshape(-1, two_inner // 2, hidden)
        stored = _packed_all(halves), _packed_all(self.down)
        return native(self.dtype, threads).experts(self.mine, *stored, hidden, moe, self.activation)

    def want(self) -> torch.Tensor:
        wide = self.gate_up.float(), self.down.float()
        return plain_experts(
            self.x.float(), self.chosen.long(), self.weights, self.mine, *wide, ACTIVATIONS[self.activation]
        )


@st.composite
def cases(draw: st.DrawFn, max_tokens: int = 40) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    tokens, hidden, inner = draw(st.integers(1, max_tokens)), draw(st.integers(1, 50)), draw(st.integers(1, 50))
    num_experts = draw(st.integers(1, 9))
    per_token = draw(st.integers(1, min(3, num_experts)))
    first = draw(st.integers(0, num_experts))
    mine = range(first, draw(st.integers(first, num_experts)))
    # Few of the experts at times, so that some have all tokens and others none.
    popular = draw(st.integers(1, num_experts))
    seed = draw(st.integers(0, 1000))
    x, gate_up, down = numbers(
        seed, (tokens, hidden), (len(mine), 2 * inner, hidden), (len(mine), hidden, inner), dtype=dtype
    )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(popular, (tokens, per_token), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, per_token, generator=generator)
    scale = 1 / math.sqrt(hidden)
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    return Case(dtype, x, chosen, weights, mine, gate_up * scale, down / math.sqrt(inner), num_experts, activation)


@on_each_set
@fewer_examples
@given(cases())
def test_a_rank_writes_what_the_plain_form_adds(instructions: str, case: Case) -> None:
    """Any placement, experts without tokens, none here at all, an expert twice for one token, all activations."""
    out = torch.full_like(case.x, math.nan)
    with running(instructions):
        experts = case.experts()
        experts.write(out, case.x, case.chosen, case.weights)
        _assert_share(instructions, out, case.want(), case)
        experts.write(out, case.x, case.chosen, case.weights)
    counts = torch.bincount(case.chosen.reshape(-1), minlength=case.num_experts)
    assert torch.equal(experts.num_tokens_E, 2 * counts)  # of all ranks, on each


@on_each_set
@fewer_examples
@given(cases())
def test_any_number_of_threads_gives_the_same_bits(instructions: str, case: Case) -> None:
    outs = [torch.empty_like(case.x) for _ in range(3)]
    with running(instructions):
        for threads, out in enumerate(outs, start=1):
            case.experts(threads).write(out, case.x, case.chosen, case.weights)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@on_each_set
@fewer_examples
@given(cases())
def test_a_row_has_the_same_bits_whatever_is_beside_it(instructions: str, case: Case) -> None:
    num_rows = min(len(case.x), MIN_TILE_ROWS - 1) if instructions in TILED else len(case.x)
    rows = [numbers_T[:num_rows] for numbers_T in (case.x, case.chosen, case.weights)]
    together, alone = torch.empty_like(rows[0]), torch.empty_like(rows[0][:1])
    with running(instructions):
        experts = case.experts()
        experts.write(together, *rows)
        for row in {0, num_rows // 2, num_rows - 1}:
            experts.write(alone, *(numbers_T[row : row + 1].contiguous() for numbers_T in rows))
            assert torch.equal(alone[0], together[row])


@on_each_set
def test_many_tokens_of_one_expert_are_computed_in_parts(instructions: str) -> None:
    """More than stay in the cache while weights pass."""
    x, gate_up, down = numbers(3, (150, 32), (2, 48, 32), (2, 32, 24))
    chosen = torch.zeros((150, 1), dtype=torch.int32)
    chosen[70] = 1
    weights = torch.rand(150, 1)
    case = Case(torch.float32, x, chosen, weights, range(2), gate_up / 6, down / 5, 2, "silu")
    out = torch.empty_like(x)
    with running(instructions):
        case.experts(2).write(out, x, chosen, weights)
    _assert_share(instructions, out, case.want(), case)


@on_each_set
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_numbers_that_are_none_reach_the_output(instructions: str, activation: str) -> None:
    x, gate_up, down = numbers(0, (2, 16), (1, 32, 16), (1, 16, 16))
    x[1, 3] = math.nan
    chosen, weights = torch.zeros((2, 1), dtype=torch.int32), torch.ones(2, 1)
    case = Case(torch.float32, x, chosen, weights, range(1), gate_up, down, 1, activation)
    out = torch.empty_like(x)
    with running(instructions):
        case.experts().write(out, x, chosen, weights)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()


@on_each_set
@fewer_examples
@given(cases(max_tokens=20), st.booleans(), st.booleans())
def test_a_dense_mlp_adds_what_pytorch_adds(instructions: str, case: Case, has_bias: bool, two_threads: bool) -> None:
    case = dataclasses.replace(case, mine=range(1))
    hidden, inner = case.x.shape[1], case.gate_up.shape[1] // 2
    gate_up, down, up_bias, down_bias, there = numbers(
        0, (2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,), case.x.shape, dtype=case.dtype
    )
    weights = {"gate_up": gate_up / math.sqrt(hidden), "down": down / math.sqrt(inner)}
    if has_bias:
        weights |= {"gate_up_bias": up_bias, "down_bias": down_bias}
    want = there.float()
    _plain_mlp(weights, hidden, inner, case.activation)(case.x.float(), want)
    stored = weights | {
        "gate_up": _packed_all(weights["gate_up"].reshape(2, inner, hidden)),
        "down": packed(weights["down"]),
    }
    with running(instructions):
        mlp = native(case.dtype, 1 + two_threads).gated_mlp(stored, hidden, inner, case.activation)
        assert mlp(case.x, there) is there
    # With biases the gate and up are rows of the model's dtype between the products.
    rounded = has_bias and case.dtype == torch.bfloat16
    _assert_near(instructions, there, want, 1, rounds_inner=rounded)


def _plain_mlp(weights: dict[str, torch.Tensor], hidden: int, inner: int, activation: str) -> GatedMlp:
    return PLAIN.gated_mlp({name: weight.float() for name, weight in weights.items()}, hidden, inner, activation)


def _packed_all(weights_LOI: torch.Tensor) -> torch.Tensor:
    if not len(weights_LOI):
        return packed(weights_LOI.new_zeros(weights_LOI.shape[1:]))[:0]
    return torch.cat([packed(weight_OI) for weight_OI in weights_LOI])


def _assert_share(instructions: str, out: torch.Tensor, want: torch.Tensor, case: Case) -> None:
    _assert_near(instructions, out, want, case.chosen.shape[1])


def _assert_near(
    instructions: str, got: torch.Tensor, want: torch.Tensor, size: float, *, rounds_inner: bool = False
) -> None:
    """Tiles take the inner layer in bfloat16 where the weights are."""
    if rounds_inner or (instructions in TILED and got.dtype == torch.bfloat16):
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-5 * size)
    else:
        assert_close(got, want, size)


def test_memory_for_fewer_tokens_than_there_are_is_refused() -> None:
    weight = torch.zeros(1, 1, 16 * 16)
    moe = MoeConfig(1, 1, 16, False, False)
    experts = native(torch.float32, 1).experts(range(1), weight.expand(2, -1, -1).clone(), weight, 16, moe, "silu")
    chosen, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(ValueError, match="2 rows were given, and there is memory for 0"):
        experts.write(torch.empty(0, 16), torch.ones(2, 16), chosen, weights)
