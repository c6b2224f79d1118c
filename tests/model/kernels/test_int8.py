# SPDX-License-Identifier: MIT OR Apache-2.0
"""Native kernels of quantised weights: the same items as PyTorch's, and products with them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.kernels.layout import pack_quantised, packed_shape
from metrale_ray.model.kernels.native_kernels import NativeKernels
from metrale_ray.model.kernels.torch_kernels import TorchKernels
from metrale_ray.model.quantization.int8 import quantise, quantised_rows, row_scales
from tests.model.kernels.reference import CPU, DTYPES, assert_close, numbers
from tests.native.instructions import fewer_examples, needs_core, on_each_set, running

pytestmark = needs_core
PLAIN = TorchKernels(CPU, torch.float32, is_quantised=True)
dtypes = st.sampled_from(DTYPES)
row_counts = st.integers(1, 20) | st.sampled_from([48, 49, 64, 65])
sizes = st.integers(1, 70)
seeds = st.integers(0, 1000)


def native(dtype: torch.dtype, threads: int = 1) -> NativeKernels:
    return NativeKernels(dtype, threads, is_quantised=True)


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [M, O, I] as the core has them: items and scales."""
    matrices, outputs, inputs = weight.shape
    items = torch.zeros((matrices, *packed_shape(outputs, inputs, torch.int8)), dtype=torch.int8)
    scales = torch.zeros((matrices, items.shape[1] * 16))
    for matrix, rows in enumerate(weight):
        scales[matrix, :outputs] = row_scales(rows)
        pack_quantised(rows, items[matrix], 0, scales[matrix])
    return items, scales


def unpacked(items: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The items of a matrix [blocks, ..] in their order, [O, I]."""
    fours = items.view(len(items), -1, 16, 4)
    return fours.transpose(1, 2).reshape(len(items) * 16, -1)[:outputs, :inputs]


@on_each_set
@fewer_examples
@given(dtypes, sizes, st.integers(1, 600), seeds, st.data())
def test_rows_become_the_items_that_pytorch_makes_of_them(
    instructions: str, dtype: torch.dtype, outputs: int, inputs: int, seed: int, data: st.DataObject
) -> None:
    (weight,) = numbers(seed, (outputs, inputs + 2), dtype=dtype)
    weight[0, 0], weight[-1, -1] = math.inf, math.nan
    columns, scales = weight[:, 1 : inputs + 1], row_scales(weight)
    items = torch.zeros(packed_shape(outputs, inputs, torch.int8), dtype=torch.int8)
    cut = data.draw(st.integers(0, outputs))
    with running(instructions):
        for rows, first in ((columns[:cut], 0), (columns[cut:], cut)):
            pack_quantised(rows, items, first, scales)
    assert torch.equal(unpacked(items, outputs, inputs), quantised_rows(columns, scales))
    assert int(unpacked(items, len(items) * 16, packed_shape(1, inputs, torch.int8)[1] // 16).count_nonzero()) == int(
        quantised_rows(columns, scales).count_nonzero()
    )


@on_each_set
@fewer_examples
@given(dtypes, row_counts, sizes, sizes, st.booleans(), seeds)
def test_every_shape_gives_what_pytorch_gives(
    instructions: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, has_bias: bool, seed: int
) -> None:
    x, weight, bias = numbers(seed, (rows, inputs), (1, outputs, inputs), (outputs,), dtype=dtype)
    plain, shape = quantise(weight[0]), (outputs, inputs)
    wide_bias, bias_O = (bias.float(), bias) if has_bias else (None, None)
    want = PLAIN.linear(plain.items, shape, wide_bias, scales=plain.scales)(x.float())
    with running(instructions):
        items, scales = packed(weight)
        one = native(dtype).linear(items, shape, bias_O, scales=scales)(x)
        three = native(dtype, 3).linear(items, shape, bias_O, scales=scales)(x)
    assert_close(one, want, math.sqrt(inputs))
    assert torch.equal(one, three)


def moe(inner: int) -> MoeConfig:
    return MoeConfig(5, experts_per_token=2, intermediate_size=inner, normalize_weights=True, round_weights=False)


@on_each_set
@fewer_examples
@given(dtypes, st.integers(1, 20), st.integers(1, 40), st.integers(1, 40), seeds)
def test_experts_give_what_pytorch_gives(
    instructions: str, dtype: torch.dtype, rows: int, hidden: int, inner: int, seed: int
) -> None:
    shapes = (rows, hidden), (3, 2 * inner, hidden), (3, hidden, inner), (rows, 5)
    x, gate_up, down, scores = numbers(seed, *shapes, dtype=dtype)
    weights_TK, chosen_TK = (part.contiguous() for part in torch.softmax(scores.float(), dim=1).topk(2, dim=1))
    want, got = torch.empty(rows, hidden), torch.empty(rows, hidden, dtype=dtype)
    up, low, mine = quantise(gate_up), quantise(down), range(1, 4)
    plain = PLAIN.experts(mine, up.items, low.items, hidden, moe(inner), "silu", (up.scales, low.scales))
    plain.write(want, x.float(), chosen_TK, weights_TK)
    with running(instructions):
        halves, scales = packed(gate_up.view(6, inner, hidden))
        downs, down_scales = packed(down)
        experts = native(dtype).experts(mine, halves, downs, hidden, moe(inner), "silu", (scales, down_scales))
        experts.write(got, x, chosen_TK.to(torch.int32), weights_TK)
    assert_close(got, want, 10 * math.sqrt(hidden * inner))


@on_each_set
@fewer_examples
@given(st.integers(1, 20), st.integers(1, 40), st.integers(1, 40), st.booleans(), seeds)
def test_a_gated_mlp_gives_what_pytorch_gives_with_and_without_biases(
    instructions: str, rows: int, hidden: int, inner: int, has_bias: bool, seed: int
) -> None:
    shapes = (rows, hidden), (2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,)
    x, gate_up, down, up_bias, down_bias = numbers(seed, *shapes)
    biases = {"gate_up_bias": up_bias, "down_bias": down_bias} if has_bias else {}
    up, low = quantise(gate_up), quantise(down)
    plain = {"gate_up": up.items, "gate_up_scales": up.scales, "down": low.items, "down_scales": low.scales}
    want = PLAIN.gated_mlp(plain | biases, hidden, inner, "silu")(x, torch.zeros(rows, hidden))
    with running(instructions):
        halves, scales = packed(gate_up.view(2, inner, hidden))
        downs, down_scales = packed(down[None])
        held = {"gate_up": halves, "gate_up_scales": scales, "down": downs, "down_scales": down_scales}
        got = native(torch.float32).gated_mlp(held | biases, hidden, inner, "silu")(x, torch.zeros(rows, hidden))
    assert_close(got, want, 10 * math.sqrt(hidden * inner))
