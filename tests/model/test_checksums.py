# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sums over weights: every bit counts, every part is read, and a damaged tensor is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import MemoryDamaged
from metrale_ray.model.checksums import (
    CHUNK_BYTES,
    PART_BYTES,
    Checksums,
    chunk_sums,
    is_replicated,
    num_chunks,
    rows_sums,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Bytes below, at and above a chunk and a word, and of several chunks with a rest of 2 bytes.
SIZES_BYTES = (4, 8, 12, CHUNK_BYTES - 4, CHUNK_BYTES, CHUNK_BYTES + 4, 3 * CHUNK_BYTES + 20)


def tensor_of(num_bytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_bytes)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


def flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def weights() -> dict[str, torch.Tensor]:
    """Replicated ones of several chunks and of less than one, an empty one, and a rank's own."""
    return {
        "embedding": tensor_of(3 * CHUNK_BYTES + 20).view(-1, 2),
        "layers.0.input_layernorm": tensor_of(12),
        "layers.0.experts.gate_up": tensor_of(2 * CHUNK_BYTES + 4),
        "layers.0.experts.down": torch.empty(0, 4, 4),
        "layers.0.qkv": tensor_of(CHUNK_BYTES),
        "final_norm": tensor_of(8),
        "head": tensor_of(CHUNK_BYTES + 4),
    }


def test_taking_the_sums_of_the_load_tells_of_each_tensor() -> None:
    told: list[int] = []
    sums = Checksums(weights())
    sums.note_loaded(lambda: told.append(len(sums._loaded)))
    assert told == list(range(1, len(weights()) + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bytes", SIZES_BYTES)
def test_every_flipped_bit_changes_the_sum_of_its_chunk_alone(num_bytes: int, dtype: torch.dtype) -> None:
    tensor = tensor_of(num_bytes, dtype)
    count = num_chunks(tensor)
    before = chunk_sums(tensor, 0, count)
    assert (before.dtype, len(before)) == (torch.int64, -(-num_bytes // CHUNK_BYTES))
    last_bit = num_bytes * 8 - 1
    for bit in {0, 7, 63 % (last_bit + 1), last_bit // 2, last_bit}:
        flip(tensor, bit)
        differs = (chunk_sums(tensor, 0, count) != before).nonzero().flatten().tolist()
        assert differs == [bit // 8 // CHUNK_BYTES]
        flip(tensor, bit)


@pytest.mark.parametrize("num_bytes", SIZES_BYTES)
def test_the_sums_of_some_chunks_are_those_of_all_cut_out(num_bytes: int) -> None:
    tensor = tensor_of(num_bytes)
    whole = chunk_sums(tensor, 0, num_chunks(tensor))
    for first in range(len(whole)):
        for last in range(first + 1, len(whole) + 1):
            assert torch.equal(chunk_sums(tensor, first, last), whole[first:last])


def test_the_sum_of_each_row_is_its_own() -> None:
    rows = tensor_of(96).view(3, 2, 4, 2)
    before = rows_sums(rows)
    flip(rows, 8 * 40)
    assert (rows_sums(rows) != before).tolist() == [False, True, False]


def test_experts_the_final_norm_and_the_head_are_a_ranks_own() -> None:
    own = {"layers.0.experts.gate_up", "layers.0.experts.down", "final_norm", "head"}
    assert {name for name in weights() if not is_replicated(name)} == own


@given(st.integers(1, 40), st.data())
def test_a_flipped_bit_is_found_in_exactly_one_part_and_its_tensor_named(num_parts: int, data: st.DataObject) -> None:
    held = weights()
    sums = Checksums(held)
    sums.note_loaded()
    name = data.draw(st.sampled_from([name for name, tensor in held.items() if tensor.numel()]))
    bit = data.draw(st.integers(0, held[name].nbytes * 8 - 1))
    flip(held[name], bit)
    alarms = []
    for part in range(num_parts):
        try:
            sums.digest(part, num_parts)
        except MemoryDamaged as error:
            alarms.append(error.message)
    (alarm,) = alarms
    assert MemoryDamaged.tensor_of(alarm) == name
    assert alarm.endswith(f"the first from byte {bit // 8 // CHUNK_BYTES * CHUNK_BYTES} on")


@pytest.mark.parametrize("num_parts", [1, 2, 5, 100])
def test_replicated_weights_have_equal_digests_on_ranks_that_differ_in_their_own(num_parts: int) -> None:
    mine, other = weights(), {name: t for name, t in weights().items() if name not in ("final_norm", "head")}
    other["layers.0.experts.gate_up"] = tensor_of(CHUNK_BYTES)
    one, two = Checksums(mine), Checksums(other)
    assert [one.digest(p, num_parts) for p in range(num_parts)] == [two.digest(p, num_parts) for p in range(num_parts)]
    flip(other["layers.0.qkv"], 1000)
    differs = [one.digest(p, num_parts) != two.digest(p, num_parts) for p in range(num_parts)]
    assert sum(differs) == 1


def test_without_sums_of_the_load_nothing_is_compared_with_it() -> None:
    held = weights()
    sums = Checksums(held)
    flip(held["head"], 3)
    sums.digest(0, 1)
    sums.note_loaded()
    sums.digest(0, 1)
    flip(held["head"], 3)
    with pytest.raises(MemoryDamaged, match=r"^head no longer holds what was loaded: 1 of 2 chunks of 16384 bytes"):
        sums.digest(0, 1)


def test_parts_are_of_a_size_that_takes_milliseconds() -> None:
    assert Checksums({}).num_parts == 1
    assert Checksums(weights()).num_parts == 1
    large = torch.empty(2 * PART_BYTES + 4, dtype=torch.uint8, device="meta").view(torch.float32)
    assert Checksums({"embedding": large}).num_parts == 3
