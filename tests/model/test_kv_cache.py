# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.kv_cache import KvCache
from tests.fixtures.group import CPU
from tests.model.families.test_families import QWEN3, read


def cache(num_blocks: int = 6, block_size: int = 4) -> KvCache:
    return KvCache(read(QWEN3), num_blocks, block_size, CPU, torch.float32)


@given(st.permutations(range(6)), st.integers(0, 24), st.integers(0, 24))
def test_places_follow_the_block_table(table: list[int], one: int, other: int) -> None:
    start, end = sorted((one, other))
    want = [table[position // 4] * 4 + position % 4 for position in range(start, end)]
    assert cache().places(table, start, end) == want


def test_positions_past_the_table_are_refused() -> None:
    with pytest.raises(IndexError):
        cache().places([3], 0, 5)


def test_what_was_written_is_gathered_and_the_null_block_stays_zero() -> None:
    kv = cache()
    keys, values = torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    kv.write(1, torch.tensor([9, 2, 20]), keys, values)
    got = kv.gather(1, torch.tensor([[2, kv.null_place], [20, 9]]))
    assert torch.equal(got[:, :, 0], torch.stack((torch.stack((keys[1], torch.zeros(2, 32))), keys[[2, 0]])))
    assert torch.equal(got[1, :, 1], values[[2, 0]])
    assert kv.null_place == 24
    assert not kv.gather(0, torch.arange(24, 28)).any()
