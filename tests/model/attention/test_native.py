# SPDX-License-Identifier: MIT OR Apache-2.0
"""Native attention against the plain one, over random steps; and its cache against its own plain form."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import CommandRefused
from metrale_ray.model.attention.native import NativeAttention
from metrale_ray.model.attention.packed_cache import PackedKvCache
from metrale_ray.model.attention.plain import plain_attention
from metrale_ray.native import library
from tests.fixtures.group import CPU
from tests.model.attention.test_sdpa import random_step, rows
from tests.model.families.test_families import QWEN3, read

pytestmark = pytest.mark.skipif(library.library() is None, reason=library.why_not())
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
windows = st.sampled_from([None, 1, 3, 8, 17, 100])


def attend(
    shape: list[tuple[int, int]], window: int | None, seed: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the core gives for a random step, and what the plain form gives."""
    spans, seqs, cache = random_step(shape, seed, block_size, dtype=dtype, kind=PackedKvCache)
    attention = NativeAttention(cache)
    num_rows = sum(len(span.token_ids) for span in spans)
    qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    got = attention(1, qkv, attention.plan(spans, seqs, window))
    return got.float(), plain_attention(1, qkv[:, :HEADS], cache, spans, seqs, window)


@given(rows, windows, st.integers(0, 1000), st.sampled_from([16, 32]), dtypes)
def test_every_mix_of_rows_equals_the_plain_form(
    shape: list[tuple[int, int]], window: int | None, seed: int, block_size: int, dtype: torch.dtype
) -> None:
    got, want = attend(shape, window, seed, block_size, dtype)
    assert torch.allclose(got, want, atol=LIMITS[dtype])


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_parts_of_a_long_context_are_joined(dtype: torch.dtype, window: int | None) -> None:
    """A single token's positions are cut into parts; a prompt's are not."""
    got, want = attend([(700, 1), (3, 1), (130, 70), (511, 1), (512, 1)], window, 1, 32, dtype)
    assert torch.allclose(got, want, atol=LIMITS[dtype])


@given(rows, st.integers(0, 1000), dtypes)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    shape: list[tuple[int, int]], seed: int, dtype: torch.dtype
) -> None:
    spans, seqs, cache = random_step(shape, seed, 16, dtype=dtype, kind=PackedKvCache)
    attention = NativeAttention(cache)
    num_rows = sum(len(span.token_ids) for span in spans)
    qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    together = attention(0, qkv, attention.plan(spans, seqs, None)).clone()
    first = 0
    for span, seq in zip(spans, seqs, strict=True):
        last = first + len(span.token_ids)
        alone = attention(0, qkv[first:last].clone(), attention.plan([span], [seq], None))
        assert torch.equal(alone, together[first:last])
        first = last


@pytest.mark.parametrize("head_dim", [32, 24, 6])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_core_stores_where_the_cache_gathers(dtype: torch.dtype, head_dim: int) -> None:
    config = replace(read(QWEN3), head_dim=head_dim)
    stored, plain = (PackedKvCache(config, 8, 32, CPU, dtype) for _ in range(2))
    for cache in (stored, plain):
        cache.layers[1].zero_()
    spans, seqs, _ = random_step([(5, 40), (0, 1)], 3, 32)
    tables = random.Random(0).sample(range(8), 3)
    seqs = [
        replace(seq, block_table=array("I", part)) for seq, part in zip(seqs, (tables[:2], tables[2:]), strict=True)
    ]
    qkv = torch.randn(41, HEADS + 2 * KV_HEADS, head_dim).to(dtype)
    attention = NativeAttention(stored)
    attention(1, qkv, attention.plan(spans, seqs, None))
    places = torch.tensor(
        [p for span, seq in zip(spans, seqs, strict=True) for p in plain.places(seq.block_table, span.start, span.end)]
    )
    plain.write(1, places, qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :])
    assert torch.equal(stored.layers[1], plain.layers[1])
    assert torch.equal(stored.gather(1, places)[:, 0], qkv[:, HEADS : HEADS + KV_HEADS])
    assert torch.equal(stored.gather(1, places)[:, 1], qkv[:, HEADS + KV_HEADS :])
    assert stored.first_value(1, int(places[7])) == qkv[7, HEADS + KV_HEADS, 0]


def test_a_block_that_is_not_there_and_a_table_that_is_too_short_are_refused() -> None:
    spans, seqs, cache = random_step([(5, 3)], 0, 16, kind=PackedKvCache)
    attention = NativeAttention(cache)
    qkv = torch.zeros(3, HEADS + 2 * KV_HEADS, HEAD_DIM)
    seqs[0].block_table[0] += cache.num_blocks
    with pytest.raises(CommandRefused, match="not one of 64"):
        attention(0, qkv, attention.plan(spans, seqs, None))
    seqs[0].block_table = seqs[0].block_table[:0]
    with pytest.raises(CommandRefused, match="blocks for 0 tokens"):
        attention.plan(spans, seqs, None)


def test_rows_that_are_no_numbers_spoil_themselves_alone() -> None:
    spans, seqs, cache = random_step([(5, 1), (7, 2)], 0, 16, kind=PackedKvCache)
    attention = NativeAttention(cache)
    qkv = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM)
    qkv[0] = float("nan")
    out = attention(0, qkv, attention.plan(spans, seqs, None))
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()
