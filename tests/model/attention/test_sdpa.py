# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fast attention against the plain one, over random steps."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.attention import plan
from metrale_ray.model.attention.plain import plain_attention
from metrale_ray.model.attention.plan import attention_order, plan_attention
from metrale_ray.model.attention.sdpa import SdpaAttention
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.protocol.commands import BlockId, Slot, Span
from tests.fixtures.group import CPU
from tests.model.families.test_families import QWEN3, read

NUM_BLOCKS, BLOCK_SIZE = 64, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
rows = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6)


def random_step(
    shape: list[tuple[int, int]],
    seed: int,
    block_size: int = BLOCK_SIZE,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    kind: type[KvCache] = KvCache,
) -> tuple[list[Span], list[SequenceState], KvCache]:
    """Spans of (start, length) with their sequences, over a cache of random rows."""
    chance = random.Random(seed)
    cache = kind(read(QWEN3), NUM_BLOCKS, block_size, device, dtype)
    generator = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        used = layer.view(NUM_BLOCKS + 1, -1)[:NUM_BLOCKS]
        used.copy_(torch.randn(used.shape, generator=generator))
    blocks = [BlockId(block) for block in range(NUM_BLOCKS)]
    chance.shuffle(blocks)
    spans, seqs = [], []
    for slot, (start, length) in enumerate(shape):
        table = [blocks.pop() for _ in range(-(-(start + length) // block_size))]
        spans.append(Span(Slot(slot), start, (0,) * length))
        seqs.append(SequenceState(Slot(slot), start, table))
    for layer in cache.layers:  # whatever no sequence owns is NaN
        layer.view(NUM_BLOCKS + 1, -1)[blocks] = float("nan")
    return spans, seqs, cache


@given(rows, st.sampled_from([None, 1, 3, 8, 100]), st.integers(0, 1000))
def test_every_mix_of_rows_equals_the_plain_form(shape: list[tuple[int, int]], window: int | None, seed: int) -> None:
    spans, seqs, cache = random_step(shape, seed)
    order = attention_order(spans, window)
    spans, seqs = [spans[number] for number in order], [seqs[number] for number in order]
    num_rows = sum(len(span.token_ids) for span in spans)
    qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    planned = plan_attention(spans, seqs, cache, window, torch.float32, CPU)
    got = SdpaAttention(cache)(1, qkv, planned)
    assert torch.allclose(got, plain_attention(1, qkv[:, :HEADS], cache, spans, seqs, window), atol=1e-5)


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_GROUP_PLACES", 8)
    spans, seqs, cache = random_step([(70, 1), (2, 1), (20, 1), (5, 1), (9, 3)], seed=0)
    order = attention_order(spans, None)
    spans, seqs = [spans[number] for number in order], [seqs[number] for number in order]
    planned = plan_attention(spans, seqs, cache, None, torch.float32, CPU)
    assert [tuple(group.places.shape) for group in planned.groups] == [(2, 6), (1, 21), (1, 71)]
    assert [group.mask is not None for group in planned.groups] == [True, False, False]
    assert [span.rows for span in planned.spans] == [slice(4, 7)]
    qkv = torch.randn(7, HEADS + 2 * KV_HEADS, HEAD_DIM)
    got = SdpaAttention(cache)(0, qkv, planned)
    assert torch.allclose(got, plain_attention(0, qkv[:, :HEADS], cache, spans, seqs, None), atol=1e-5)


def test_only_places_inside_the_window_are_gathered() -> None:
    spans, seqs, cache = random_step([(100, 1), (60, 5)], seed=0)
    planned = plan_attention(spans, seqs, cache, 8, torch.float32, CPU)
    assert planned.groups[0].places.shape == (1, 8)
    assert planned.spans[0].places.shape == (12,)
