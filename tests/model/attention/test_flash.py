# SPDX-License-Identifier: MIT OR Apache-2.0
"""Flash attention against SDPA: on a CPU with stand-ins of each signature, on a GPU with what is installed there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model import transformer
from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.attention.choose import AttentionChoice, choose_attention
from metrale_ray.model.attention.flash import FlashAttention
from metrale_ray.model.attention.flash_adapter import FlashKernel, adapter_for
from metrale_ray.model.attention.flash_plan import MAX_TILE_TOKENS, plan_flash
from metrale_ray.model.attention.plan import attention_order
from metrale_ray.model.attention.sdpa import SdpaAttention
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.protocol.commands import Logits
from tests.fixtures.flash import by_length, by_start
from tests.fixtures.group import CPU, Group
from tests.fixtures.tiny import random_prompt, reference_logits
from tests.model.attention.test_sdpa import HEAD_DIM, HEADS, KV_HEADS, random_step

FUNCTIONS = {"by length": by_length, "by start": by_start}
BLOCK_SIZE = 16
rows = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6)


def kernel_of(function: Callable[..., Any]) -> FlashKernel:
    adapter = adapter_for(function)
    assert adapter is not None
    return FlashKernel("a stand-in", function, adapter)


def both(
    shape: list[tuple[int, int]],
    window: int | None,
    seed: int,
    build: Callable[[KvCache], Attention[Any]],
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of one step by `build` and by SDPA."""
    spans, seqs, cache = random_step(shape, seed, BLOCK_SIZE, device, dtype)
    order = attention_order(spans, window)
    spans, seqs = [spans[number] for number in order], [seqs[number] for number in order]
    num_rows = sum(len(span.token_ids) for span in spans)
    qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM).to(device, dtype)  # views with gaps, as in the model
    outputs = []
    for attention in (build(cache), SdpaAttention(cache)):
        outputs.append(attention(1, qkv, attention.plan(spans, seqs, window)))
    return outputs[0], outputs[1]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@given(shape=rows, window=st.sampled_from([None, 1, 3, 17, 200]), seed=st.integers(0, 1000))
def test_every_mix_of_rows_equals_sdpa(
    function: Callable[..., Any], shape: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    got, want = both(shape, window, seed, lambda cache: FlashAttention(cache, kernel_of(function)))
    assert torch.allclose(got, want, atol=1e-5)


def test_a_plan_holds_what_the_kernels_read_and_pads_the_table_to_whole_tiles() -> None:
    spans, seqs, cache = random_step([(0, 1), (20, 3), (300, 20)], 0, BLOCK_SIZE)
    plan = plan_flash(spans, seqs, cache, 7, CPU)
    assert plan.query_starts.tolist() == [0, 1, 4, 24]
    assert plan.key_starts.tolist() == [0, 1, 24, 344]
    assert plan.lengths.tolist() == [1, 23, 320]
    assert (plan.longest_query, plan.longest_key, plan.window) == (20, 320, 7)
    assert plan.block_table.shape == (3, 2 * MAX_TILE_TOKENS // BLOCK_SIZE)
    assert plan.block_table[0].tolist() == [*seqs[0].block_table, *[cache.null_block] * 31]
    assert plan.block_table[2].tolist() == [*seqs[2].block_table, *[cache.null_block] * 12]
    assert plan.places.tolist()[:1] == cache.places(seqs[0].block_table, 0, 1)
    whole = (plan.query_starts, plan.key_starts, plan.lengths, plan.block_table)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in whole)


def test_blocks_are_views_of_the_cache_in_which_a_token_lies_at_its_place() -> None:
    _, _, cache = random_step([(5, 1)], 0, BLOCK_SIZE)
    keys, values = cache.blocks(1)
    layer = cache.layers[1]
    assert keys.shape == (cache.num_blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    assert (
        keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == layer.untyped_storage().data_ptr()
    )
    assert torch.equal(keys[cache.null_block], torch.zeros_like(keys[0]))
    place = 3 * BLOCK_SIZE + 5
    layer[place] = torch.arange(layer[place].numel()).view_as(layer[place])
    assert torch.equal(torch.stack((keys[3, 5], values[3, 5])), layer[place])


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("variant", ["qwen3", "mixtral, window", "dense qwen3, window in later layers"])
def test_a_whole_model_gives_the_references_logits(
    variant: str,
    function: Callable[..., Any],
    tiny: Callable[[str], Path],
    tiny_reference: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = AttentionChoice("a stand-in", lambda cache: FlashAttention(cache, kernel_of(function)))
    monkeypatch.setattr(transformer, "choose_attention", lambda *arguments: choice)
    group = Group(tiny(variant), 2, block_size=BLOCK_SIZE)
    first, second = random_prompt(40), random_prompt(21)
    group.step((0, first[:-1], Logits.NONE))
    got = group.step((1, second, Logits.ALL), (0, first[-1:], Logits.LAST))
    model = tiny_reference(variant)
    want = torch.cat((reference_logits(model, second), reference_logits(model, first)[-1:]))
    assert (got - want).abs().max() < 2e-5


def gpu_choice() -> AttentionChoice:
    """What this machine has, or a skip with the reason."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    choice = choose_attention("auto", torch.device("cuda", 0), torch.bfloat16, BLOCK_SIZE, HEAD_DIM)
    if choice.name == "sdpa":
        pytest.skip("no package with flash kernels for this GPU is installed; the log says why")
    return choice


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 17, 200])
def test_the_installed_kernels_equal_sdpa_on_this_gpu(window: int | None, dtype: torch.dtype) -> None:
    choice = gpu_choice()
    shapes = ([(0, 1)], [(300, 1), (7, 1), (63, 1)], [(0, 40)], [(16, 1), (290, 30), (0, 16), (255, 2)])
    for seed, shape in enumerate(shapes):
        got, want = both(shape, window, seed, choice.build, torch.device("cuda", 0), dtype)
        assert not got.isnan().any()
        assert torch.allclose(got.float(), want.float(), atol=2e-2), (shape, (got - want).abs().max())
