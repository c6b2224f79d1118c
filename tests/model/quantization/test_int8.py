# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights in 8 bits: how far off they are, what a row of zeros or without finite values becomes, and their products."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.quantization.int8 import (
    LARGEST,
    LEAST_MAGNITUDE,
    Quantised,
    is_quantised,
    quantise,
    quantised_rows,
    row_scales,
)
from metrale_ray.model.quantization.product import Int8Product

sizes = st.integers(1, 40)
seeds = st.integers(0, 1000)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(sizes, sizes, st.integers(-60, 60), st.sampled_from([torch.float32, torch.bfloat16]), seeds)
def test_a_weight_is_off_by_at_most_half_a_step_of_its_row(
    outputs: int, inputs: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    weight = numbers(seed, 2, outputs, inputs, dtype=dtype) * 2.0**exponent
    quantised = quantise(weight)
    off = (quantised.floats() - weight.float()).abs()
    assert (off <= quantised.scales[..., None] * (0.5 + 1e-5)).all()
    assert (quantised.items.abs().amax(dim=-1) == LARGEST).all()


def test_halves_go_to_the_even_step() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert quantise(weight).items.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_a_row_of_all_but_zeros_is_zero() -> None:
    quantised = quantise(torch.tensor([[0.0, -0.0], [LEAST_MAGNITUDE / 2, 0.0], [LEAST_MAGNITUDE, 0.0]]))
    assert quantised.items.tolist() == [[0, 0], [0, 0], [LARGEST, 0]]
    assert (quantised.scales == 0).tolist() == [True, True, False]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_value_that_is_no_finite_number_gives_none_and_spoils_no_other(value: float) -> None:
    quantised = quantise(torch.tensor([[1.0, value, 2.0], [1.0, 0.0, -2.0]]))
    out = Int8Product()(torch.ones(1, 3), quantised)
    assert not math.isfinite(float(out[0, 0]))
    assert math.isclose(float(out[0, 1]), -1.0, abs_tol=0.02)


@given(sizes, st.integers(2, 40), seeds, st.data())
def test_columns_of_rows_have_the_steps_of_the_whole_rows(
    outputs: int, inputs: int, seed: int, data: st.DataObject
) -> None:
    weight = numbers(seed, outputs, inputs)
    start = data.draw(st.integers(0, inputs - 1))
    stop = data.draw(st.integers(start + 1, inputs))
    part = quantised_rows(weight[:, start:stop], row_scales(weight))
    assert torch.equal(part, quantise(weight).items[:, start:stop])


@given(st.integers(1, 9), sizes, sizes, st.integers(1, 100), st.booleans(), seeds)
def test_a_product_is_that_of_the_weights_that_the_items_stand_for(
    rows: int, outputs: int, inputs: int, tile_items: int, has_bias: bool, seed: int
) -> None:
    quantised, x = quantise(numbers(seed, outputs, inputs)), numbers(seed + 1, rows, inputs)
    bias = numbers(seed + 2, outputs) if has_bias else None
    got = Int8Product(tile_items)(x, quantised, bias)
    want = torch.nn.functional.linear(x.double(), quantised.floats().double(), None if bias is None else bias.double())
    assert torch.allclose(got.double(), want, atol=1e-5)
    narrow = Int8Product(tile_items)(x.bfloat16(), quantised, bias)
    assert narrow.dtype == torch.bfloat16
    assert narrow.is_contiguous()


def test_stacked_matrices_come_apart() -> None:
    weight = numbers(3, 4, 5, 6)
    apart = quantise(weight).unbind()
    assert len(apart) == 4
    assert all(isinstance(one, Quantised) for one in apart)
    assert torch.equal(torch.stack([one.floats() for one in apart]), quantise(weight).floats())


def test_matrices_of_layers_and_experts_are_quantised_and_nothing_else() -> None:
    chosen = ("layers.0.qkv", "layers.1.output", "layers.2.gate_up", "layers.2.down", "layers.3.experts.gate_up")
    others = ("embedding", "head", "final_norm", "layers.0.router", "layers.0.qkv_bias", "layers.0.input_layernorm")
    assert all(map(is_quantised, chosen))
    assert not any(map(is_quantised, others))
