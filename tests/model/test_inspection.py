# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is said of a checkpoint is what a load then takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.config import EngineConfig
from metrale_ray.errors import CheckpointError, ConfigError
from metrale_ray.model.experts.placement import experts_of
from metrale_ray.model.inspection import MAX_RANKS, Inspection, inspect
from metrale_ray.model.weights import load_weights, plan_weights
from tests.fixtures.group import CPU, Group
from tests.fixtures.tiny import reference

TINY = Callable[[str], Path]
KINDS = (
    "mixtral",
    "mixtral, 5 experts",
    "qwen3",
    "qwen3, 2 experts",
    "qwen3, mixed layers",
    "qwen3, all dense",
    "qwen3, tied",
    "qwen3, biases",
    "llama",
    "dense qwen3",
)


def look(folder: Path, memory_bytes: int | None = None, **settings: Any) -> Inspection:
    return inspect(EngineConfig(model=str(folder), device="cpu", **settings), memory_bytes)


def tensor_bytes(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def loaded_bytes(folder: Path, world: int, dtype: torch.dtype, *, is_split: bool = False) -> list[int]:
    """What the weights of each rank take when they are read."""
    found = look(folder, dtype="float32")
    sizes = []
    for rank in range(world):
        plan = plan_weights(found.checkpoint, found.decoder, rank, world, is_split=is_split)
        weights = load_weights(plan, found.checkpoint.tensors, CPU, dtype, lambda done, total: None)
        sizes.append(tensor_bytes(weights.values()))
    return sizes


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_each_ranks_weights_take_what_a_load_allocates(
    tiny: TINY, variant: str, dtype: str, torch_dtype: torch.dtype
) -> None:
    for world in (1, 2, 3):
        found = look(tiny(variant), ep_size=world, dtype=dtype)
        assert [share.weight_bytes for share in found.ranks] == loaded_bytes(tiny(variant), world, torch_dtype)
        assert found.dtype == dtype


@pytest.mark.parametrize("variant", ["qwen3, mixed layers", "llama, tied", "qwen3, biases"])
def test_where_attention_is_split_each_rank_takes_what_a_load_of_its_share_allocates(tiny: TINY, variant: str) -> None:
    for world in (2, 3):
        found = look(tiny(variant), ep_size=world, dtype="float32", attention="tensor", block_size=4)
        expected = loaded_bytes(tiny(variant), world, torch.float32, is_split=True)
        assert [share.weight_bytes for share in found.ranks] == expected
        cache = Group(tiny(variant), world, num_blocks=10, is_split=True, kernels="torch").models[0]._cache
        assert cache is not None
        assert tensor_bytes(cache.layers) == 11 * found.block_bytes  # and the null block
        assert found.attention.name == "tensor"


@pytest.mark.parametrize("variant", ["mixtral, 5 experts", "qwen3, mixed layers"])
def test_the_cache_takes_what_a_loaded_model_allocates(tiny: TINY, variant: str) -> None:
    for world in (1, 2, 3):
        group = Group(tiny(variant), world, num_blocks=10, block_size=4)
        found = look(tiny(variant), ep_size=world, dtype="float32", block_size=4)
        for model in group.models:
            assert model._cache is not None
            assert tensor_bytes(model._cache.layers) == 11 * found.block_bytes  # and the null block
        assert found.cache_bytes_per_token * 4 == found.block_bytes


@pytest.mark.parametrize("variant", KINDS)
def test_parameters_are_those_of_the_reference(tiny: TINY, variant: str) -> None:
    found = look(tiny(variant))
    model = reference(tiny(variant))
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(found.stored_dtypes.values()) == found.num_parameters


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_use(tiny: TINY) -> None:
    def idle(variant: str) -> int:
        found = look(tiny(variant))
        return found.num_parameters - found.num_active_parameters

    one_expert = 3 * 24 * 48
    assert idle("mixtral") == 3 * (8 - 2) * one_expert
    assert idle("mixtral, 2 experts") == 0
    assert idle("qwen3, top 1") == 3 * 7 * one_expert
    assert idle("qwen3, mixed layers") == 2 * (5 - 2) * one_expert  # layers 1 and 5 of 6 are sparse
    assert idle("qwen3, all dense") == 0


@pytest.mark.parametrize("world", [1, 2, 3, 8, 11])
def test_experts_are_placed_as_the_ranks_place_them(tiny: TINY, world: int) -> None:
    found = look(tiny("mixtral"), ep_size=world)
    assert [share.experts for share in found.ranks] == [experts_of(8, rank, world) for rank in range(world)]
    assert [share.rank for share in found.ranks] == list(range(world))


def test_files_and_digests_are_those_of_the_checkpoint(tiny: TINY) -> None:
    found = look(tiny("qwen3"))
    assert found.file_bytes == {"model.safetensors": (tiny("qwen3") / "model.safetensors").stat().st_size}
    assert found.checkpoint.digests.keys() >= {"config.json", "model.safetensors"}


@pytest.mark.parametrize("variant", ["mixtral", "llama"])
def test_what_fits_is_the_most_that_does(tiny: TINY, variant: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32"}
    largest = [max(s.weight_bytes for s in look(tiny(variant), ep_size=n, **settings).ranks) for n in range(1, 10)]
    num_experts = {"mixtral": 8, "llama": 1}[variant]  # more ranks than experts help nobody

    @given(memory_bytes=st.integers(0, 3_000_000), world=st.integers(1, 9), max_model_len=st.integers(1, 1024))
    def check(memory_bytes: int, world: int, max_model_len: int) -> None:
        found = look(tiny(variant), memory_bytes, ep_size=world, max_model_len=max_model_len, **settings)
        fit = found.fit
        assert fit is not None

        def holds(num_ranks: int, num_blocks: int) -> bool:
            return largest[num_ranks - 1] + (num_blocks + 1) * found.block_bytes <= memory_bytes

        assert fit.num_blocks == 0 or holds(world, fit.num_blocks)
        assert not holds(world, fit.num_blocks + 1)
        assert fit.num_cache_tokens == 16 * fit.num_blocks
        blocks_each = -(-max_model_len // 16)
        assert fit.num_full_sequences == fit.num_blocks // blocks_each
        for least, num_blocks in ((fit.least_ranks, 1), (fit.least_ranks_full_length, blocks_each)):
            assert least == next((n for n in range(1, num_experts + 1) if holds(n, num_blocks)), None)

    check()


def test_no_memory_given_leaves_what_fits_out(tiny: TINY) -> None:
    assert look(tiny("qwen3")).fit is None


def test_what_could_not_be_served_is_refused_as_at_a_start(tiny: TINY, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        look(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len is 2000"):
        look(tiny("qwen3"), max_model_len=2000)
    with pytest.raises(ConfigError, match=f"up to {MAX_RANKS} ranks"):
        look(tiny("qwen3"), ep_size=MAX_RANKS + 1)
