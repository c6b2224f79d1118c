# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models with weights in 8 bits: each layer's output within its bound, the same at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.damage import flip_bit
from metrale_ray.model.inspection import inspect
from metrale_ray.model.kernels.choose import Kind, check_quantization, layout_of
from metrale_ray.model.quantization.int8 import is_quantised, scales_of
from metrale_ray.model.ranks import introduce, open_rank
from metrale_ray.model.weights import Weights, load_weights, plan_weights, read_decoder_config
from metrale_ray.native import library

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = ("torch", "native") if library.library() is not None else ("torch",)
VARIANTS = ("mixtral, 5 experts", "qwen3, mixed layers", "qwen3, biases", "llama")
TINY = Callable[[str], Path]


def load(folder: Path, kind: Kind, quantization: str, rank: int = 0, world: int = 1) -> Weights:
    checkpoint = open_checkpoint(str(folder))
    plan = plan_weights(checkpoint, read_decoder_config(checkpoint), rank, world)
    layout = layout_of(kind, quantization)
    return load_weights(plan, checkpoint.tensors, CPU, torch.float32, lambda done, total: None, layout)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_matrix_times_rows_is_within_its_bound_of_the_one_in_floats(variant: str, tiny: TINY) -> None:
    plain, quantised = load(tiny(variant), "torch", "none"), load(tiny(variant), "torch", "int8")
    for name, weight in plain.items():
        if not is_quantised(name):
            assert torch.equal(quantised[name], weight), name
            continue
        x_I = torch.randn(weight.shape[-1], generator=torch.Generator().manual_seed(1))
        scales = quantised[scales_of(name)]
        off = (quantised[name].float() * scales[..., None] - weight) @ x_I
        assert (off.abs() <= 0.501 * scales * x_I.abs().sum()).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_the_same_items_and_scales_as_one_rank(kind: Kind, tiny: TINY) -> None:
    folder = tiny("qwen3, mixed layers")
    whole, shards = load(folder, kind, "int8"), [load(folder, kind, "int8", rank, 3) for rank in range(3)]
    for name, tensor in whole.items():
        if ".experts." in name:
            assert torch.equal(torch.cat([shard[name] for shard in shards]), tensor), name
        else:
            assert torch.equal(shards[0][name], tensor), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_said_of_a_rank_is_what_it_takes(variant: str, tiny: TINY) -> None:
    found = inspect(EngineConfig(model=str(tiny(variant)), device="cpu", dtype="float32", quantization="int8"))
    assert found.quantization == "int8"
    taken = sum(tensor.nbytes for tensor in load(tiny(variant), "torch", "int8").values())
    assert found.ranks[0].weight_bytes == taken
    assert taken < sum(tensor.nbytes for tensor in load(tiny(variant), "torch", "none").values())


def test_ranks_compare_their_quantization(tiny: TINY) -> None:
    for quantization in ("none", "int8"):
        config = EngineConfig(model=str(tiny("llama")), device="cpu", quantization=quantization).resolved({})
        assert introduce(open_rank(config, 0)).must_equal["quantization"] == quantization


def test_a_gpu_has_no_quantised_weights() -> None:
    check_quantization("none", torch.device("cuda"))
    check_quantization("int8", CPU)
    with pytest.raises(ConfigError, match="which is for CPUs, and the device is cuda"):
        check_quantization("int8", torch.device("cuda"))


def test_one_bit_of_an_item_can_be_flipped() -> None:
    items = torch.tensor([5, -3], dtype=torch.int8)
    flip_bit(items)
    assert items.tolist() == [4, -3]
    flip_bit(items, high_bit=0)
    assert items.tolist() == [68, -3]
