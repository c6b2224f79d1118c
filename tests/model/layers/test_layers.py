# SPDX-License-Identifier: MIT OR Apache-2.0
"""Norm, rotation and products against plain formulas and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, apply_rotary_pos_emb

from metrale_ray.model.families.config_reader import ConfigReader
from metrale_ray.model.families.rope_reader import read_rope
from metrale_ray.model.layers.linear import MIN_WIDE_ROWS, WideProduct, choose_product, cpu_product
from metrale_ray.model.layers.norm import rms_norm
from metrale_ray.model.layers.rotary import Rotary, rotate

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 20.0,
        "truncate": False,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.5},
]


@pytest.mark.parametrize("parameters", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers_bit_for_bit(parameters: dict[str, Any], dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    config = transformers.Qwen3MoeConfig(**sizes, rope_parameters=dict(parameters))
    positions = torch.tensor([0, 1, 2, 63, 64, 300, 511])
    x = torch.randn(7, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = Qwen3MoeRotaryEmbedding(config)(x, positions[None])
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    rope = read_rope(ConfigReader({**sizes, "rope_parameters": parameters}), 10_000.0)
    got = rotate(x, *Rotary(rope, 32, torch.device("cpu"), dtype).angles(positions))
    assert torch.allclose(got.float(), want[0].transpose(0, 1).float(), atol=2e-7 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_computed_in_fp32_and_rounded_before_the_weight(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 16, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    weight = torch.linspace(0.5, 1.5, 16).to(dtype)
    wide = x.float()
    want = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    assert torch.equal(rms_norm(x, weight, 1e-6), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, MIN_WIDE_ROWS - 1, MIN_WIDE_ROWS, 40])
@pytest.mark.parametrize("shape", [(7, 16), (5, 300), (9, 513), (3, 1025)])
def test_the_wide_product_is_the_exact_one_rounded_once(
    dtype: torch.dtype, num_rows: int, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    for given in (None, bias):
        got = WideProduct(tile_items=1024)(x, weight, given)
        want = functional.linear(x.double(), weight.double(), None if given is None else given.double())
        assert got.dtype == dtype
        assert torch.allclose(got.double(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_one_row_is_multiplied_as_several_are(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((num_rows, 9), (5, 9), (5,)))
    for given in (None, bias):
        assert torch.allclose(cpu_product(x, weight, given), functional.linear(x, weight, given), atol=1e-6)


def test_other_devices_use_the_plain_product() -> None:
    assert choose_product(torch.device("cpu"), torch.float32) is cpu_product
    assert choose_product(torch.device("cuda"), torch.bfloat16) is functional.linear


@pytest.mark.parametrize(("capability", "is_wide"), [("DEFAULT", True), ("AVX2", True), ("AVX512", False)])
def test_only_a_cpu_without_16_bit_arithmetic_widens(
    capability: str, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert isinstance(choose_product(torch.device("cpu"), torch.bfloat16), WideProduct) == is_wide
