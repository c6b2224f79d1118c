# SPDX-License-Identifier: MIT OR Apache-2.0
"""Native products with matrices, and tables of rows, against PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.kernels.kernels import Linear
from metrale_ray.model.kernels.layout import packed
from tests.model.kernels.reference import DTYPES, PLAIN, assert_close, native, numbers
from tests.native.instructions import MIN_TILE_ROWS, TILED, fewer_examples, needs_core, on_each_set, running

pytestmark = needs_core
dtypes = st.sampled_from(DTYPES)
# Rows around what is multiplied at once, and panels of it; sizes around blocks of 16.
row_counts = st.integers(1, 20) | st.sampled_from([47, 48, 49, 63, 64, 65, 100])
sizes = st.integers(1, 70)
seeds = st.integers(0, 1000)


def linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, threads: int = 1, **options: bool) -> Linear:
    outputs, inputs = weight_OI.shape
    kernels = native(weight_OI.dtype, threads)
    return kernels.linear(packed(weight_OI), (outputs, inputs), bias_O, **options)


@on_each_set
@fewer_examples
@given(dtypes, row_counts, sizes, sizes, st.booleans(), seeds)
def test_every_shape_gives_what_pytorch_gives(
    instructions: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, has_bias: bool, seed: int
) -> None:
    x, weight, bias = numbers(seed, (rows, inputs), (outputs, inputs), (outputs,), dtype=dtype)
    bias_O = bias if has_bias else None
    want = torch.nn.functional.linear(x.float(), weight.float(), None if bias_O is None else bias_O.float())
    with running(instructions):
        assert_close(linear(weight, bias_O)(x), want, math.sqrt(inputs))
        wide = linear(weight, bias_O, is_wide=True)(x)
    assert wide.dtype == torch.float32
    assert_close(wide, want, math.sqrt(inputs))


@on_each_set
@fewer_examples
@given(dtypes, row_counts, sizes, sizes, seeds)
def test_outputs_can_be_added_to_rows_with_gaps(
    instructions: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    x, weight, there = numbers(seed, (rows, inputs + 3), (outputs, inputs), (rows, outputs + 5), dtype=dtype)
    x_TI, add_to = x[:, 2 : inputs + 2], there[:, 1 : outputs + 1]
    want = add_to.float() + x_TI.float() @ weight.float().t()
    left_alone = there.clone()
    with running(instructions):
        given_back = linear(weight)(x_TI, add_to)
    assert given_back.data_ptr() == add_to.data_ptr()
    assert_close(add_to, want, math.sqrt(inputs) + 1)
    assert torch.equal(there[:, 0], left_alone[:, 0])
    assert torch.equal(there[:, outputs + 1 :], left_alone[:, outputs + 1 :])


@on_each_set
@fewer_examples
@given(dtypes, row_counts, sizes, st.integers(1, 200), seeds)
def test_any_number_of_threads_gives_the_same_bits(
    instructions: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    x, weight = numbers(seed, (rows, inputs), (outputs, inputs), dtype=dtype)
    with running(instructions):
        one, two, three = (linear(weight, threads=threads)(x) for threads in (1, 2, 3))
    assert torch.equal(one, two)
    assert torch.equal(one, three)


@on_each_set
@fewer_examples
@given(dtypes, row_counts, sizes, st.integers(1, 200), seeds)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    instructions: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    if instructions in TILED:
        rows = min(rows, MIN_TILE_ROWS - 1)
    x, weight = numbers(seed, (rows, inputs), (outputs, inputs), dtype=dtype)
    with running(instructions):
        product = linear(weight)
        together = product(x).clone()
        for row in {0, rows // 2, rows - 1}:
            assert torch.equal(product(x[row : row + 1])[0], together[row])
        for first, last in ((0, 2), (1, 4), (rows // 2, rows)):
            assert torch.equal(product(x[first:last]), together[first:last])


@on_each_set
def test_numbers_that_are_none_stay_in_their_row(instructions: str) -> None:
    x, weight = numbers(0, (3, 40), (20, 40))
    x[1, 7] = math.nan
    with running(instructions):
        out = linear(weight)(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@given(dtypes, st.integers(1, 70), sizes, st.lists(st.integers(0, 69), max_size=9), seeds)
def test_a_packed_table_gives_its_rows_as_they_were(
    dtype: torch.dtype, num_rows: int, width: int, ids: list[int], seed: int
) -> None:
    (table,) = numbers(seed, (num_rows, width), dtype=dtype)
    ids_T = torch.tensor([number % num_rows for number in ids], dtype=torch.int64)
    rows = native(dtype).embedding(packed(table), (num_rows, width), is_matrix=True)(ids_T)
    assert torch.equal(rows, PLAIN.embedding(table, (num_rows, width), is_matrix=False)(ids_T))


@pytest.mark.parametrize("token_id", [-1, 5])
def test_a_token_that_the_table_has_not_is_an_error(token_id: int) -> None:
    (table,) = numbers(0, (5, 8))
    embedding = native(torch.float32).embedding(packed(table), (5, 8), is_matrix=True)
    with pytest.raises(IndexError, match=r"outside 0\.\.4"):
        embedding(torch.tensor([1, token_id]))
