# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows into packed blocks, against the plain arrangement of the same items."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from metrale_ray.model.kernels.layout import pack_rows, packed_shape
from metrale_ray.native import library
from tests.model.kernels.reference import DTYPES, numbers
from tests.native.instructions import fewer_examples, needs_core, on_each_set, running

pytestmark = needs_core
UNTOUCHED = -77.0  # exact in bfloat16


def plainly_packed(weight_OI: torch.Tensor, padding: float) -> torch.Tensor:
    """[blocks, items of a block]: outputs by 16, in each block its inputs in steps, in each step its outputs."""
    step = library.STEPS[{torch.float32: library.FP32, torch.bfloat16: library.BF16}[weight_OI.dtype]]
    outputs, inputs = weight_OI.shape
    whole = functional.pad(weight_OI, (0, -inputs % step))
    whole = functional.pad(whole, (0, 0, 0, -outputs % library.BLOCK), value=padding)
    blocks = whole.view(-1, library.BLOCK, whole.shape[1] // step, step)
    return blocks.transpose(1, 2).reshape(len(blocks), -1)


@on_each_set
@fewer_examples
@given(
    st.sampled_from(DTYPES), st.integers(1, 70), st.integers(1, 70), st.lists(st.integers(0, 70), max_size=3), st.data()
)
def test_rows_may_come_in_any_parts(
    instructions: str, dtype: torch.dtype, outputs: int, inputs: int, cuts: list[int], data: st.DataObject
) -> None:
    """Each part touches its own outputs and no others, and the inputs' padding becomes zero."""
    (weight,) = numbers(data.draw(st.integers(0, 1000)), (outputs, inputs), dtype=dtype)
    matrix = torch.full(packed_shape(outputs, inputs, dtype), UNTOUCHED, dtype=dtype)
    bounds = sorted({0, outputs, *(cut for cut in cuts if cut < outputs)})
    parts = data.draw(st.permutations(list(itertools.pairwise(bounds))))
    with running(instructions):
        for first, last in parts:
            pack_rows(weight[first:last], matrix, first)
    assert torch.equal(matrix, plainly_packed(weight, UNTOUCHED))


@on_each_set
def test_rows_that_begin_at_an_odd_place_in_memory_are_packed_alike(instructions: str) -> None:
    """bfloat16 rows are read as pairs of items, which memory need not begin with."""
    (items,) = numbers(0, (1 + 20 * 8,), dtype=torch.bfloat16)
    weight = items[1:].view(20, 8)
    matrix = torch.zeros(packed_shape(20, 8, torch.bfloat16), dtype=torch.bfloat16)
    with running(instructions):
        pack_rows(weight, matrix, 0)
    assert torch.equal(matrix, plainly_packed(weight, 0.0))
