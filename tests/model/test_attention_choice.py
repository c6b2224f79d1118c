# SPDX-License-Identifier: MIT OR Apache-2.0
"""Replicated or split attention: what `auto` compares, and what settings ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.baton import Baton
from metrale_ray.config import EngineConfig
from metrale_ray.model.attention_choice import GLOO, SHARED_MEMORY, AttentionMode, choose_mode, decode_step
from metrale_ray.model.collectives import InProcess, InProcessGroup
from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig, RopeConfig
from metrale_ray.model.ranks import build_replica, differences, introduce, open_rank

TINY = Callable[[str], Path]
CPU = torch.device("cpu")
# About the size of a checkpoint of 1.3B parameters.
MIDDLE = DecoderConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=32_000,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=3072,
    rms_norm_eps=1e-6,
    activation="silu",
    max_positions=4096,
    rope=RopeConfig("default", 10_000.0),
    sliding_window=None,
    windowed_layers=(False,) * 12,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    qk_norm=True,
    moe=MoeConfig(32, 4, 768, True, False),
    sparse_layers=(True,) * 12,
)
LESSER = replace(MIDDLE, vocab_size=8000, hidden_size=256)
SMALL = replace(MIDDLE, vocab_size=320, hidden_size=48, head_dim=16, num_heads=4, num_kv_heads=2)


def choose(setting: str = "auto", decoder: DecoderConfig = MIDDLE, world: int = 2, **changes: Any) -> AttentionMode:
    settings: dict[str, Any] = {"rows": 8, "tokens": 1024, "cost": SHARED_MEMORY, **changes}
    return choose_mode(setting, decoder, world, settings.pop("device", CPU), torch.bfloat16, **settings)


def test_auto_splits_where_reading_less_saves_more_than_the_sums_cost_and_says_why() -> None:
    assert choose().is_split
    assert "replicated reads 0.225 GiB" in choose().reason
    assert "tensor reads 0.113 GiB" in choose().reason
    assert "MiB in 26 collectives" in choose().reason
    assert not choose(decoder=SMALL).is_split
    assert choose(decoder=LESSER).is_split
    assert not choose(decoder=LESSER, cost=GLOO).is_split


def test_settings_one_rank_and_gpus_are_not_weighed() -> None:
    assert choose("tensor", SMALL).is_split
    assert not choose("replicated").is_split
    assert not choose("tensor", world=1).is_split
    assert not choose(device=torch.device("cuda")).is_split
    assert choose("tensor", device=torch.device("cuda")).is_split


@pytest.mark.parametrize("world", [2, 3, 4, 9])
def test_a_split_step_reads_a_ranks_share_and_has_a_sum_for_each_part(world: int) -> None:
    whole = decode_step(MIDDLE, world, torch.bfloat16, is_split=False, rows=8, tokens=100)
    split = decode_step(MIDDLE, world, torch.bfloat16, is_split=True, rows=8, tokens=100)
    assert whole.num_collectives == 12
    assert split.num_collectives == 1 + 2 * 12 + 1
    assert whole.read_bytes / world <= split.read_bytes < whole.read_bytes
    per_layer = 1024 * 128 * 2 * (16 + 4)
    cache = 2 * 12 * 100 * 8 * 4 * 128
    assert whole.read_bytes == 2 * (12 * per_layer + 32_000 * 1024 + cache)


def test_ranks_that_resolved_the_setting_otherwise_are_refused(tiny: TINY) -> None:
    def hello(rank: int, attention: str) -> Any:
        config = EngineConfig(model=str(tiny("qwen3")), device="cpu", ep_size=2, attention=attention).resolved({})
        return introduce(open_rank(config, rank))

    line = "attention_over_ranks: rank 0 has 'tensor', rank 1 has 'replicated'"
    assert line in differences(hello(0, "tensor"), hello(1, "auto"))
    assert differences(hello(0, "tensor"), hello(1, "tensor")) == []


def test_a_rank_without_heads_has_room_for_all_blocks(tiny: TINY) -> None:
    def num_blocks(rank: int) -> int:
        settings: dict[str, Any] = {"ep_size": 3, "attention": "tensor", "kv_cache_memory": 2**15, "dtype": "float32"}
        config = EngineConfig(model=str(tiny("qwen3")), device="cpu", **settings).resolved({})
        setup = open_rank(config, rank)
        assert rank < 2 or introduce(setup).num_blocks == setup.limits.max_num_blocks
        return introduce(setup).num_blocks

    one_head = 3 * 2 * 16 * 16 * 4  # layers, keys and values, tokens, their size, bytes of a number
    assert [num_blocks(rank) for rank in range(2)] == [2**15 // one_head] * 2
    assert num_blocks(2) > 2**15 // one_head


def test_the_first_rank_says_once_what_was_chosen(tiny: TINY, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model=str(tiny("qwen3")), device="cpu", ep_size=2).resolved({})
    group = InProcessGroup(Baton(), 2)
    with caplog.at_level(logging.INFO, logger="metrale_ray"):
        for rank in range(2):
            setup = open_rank(config, rank)
            sizes = (8, setup.decoder.hidden_size, setup.dtype)
            build_replica(setup, InProcess(group, rank, *sizes), None, lambda *_: None)
    (line,) = [message for message in caplog.messages if message.startswith("attention: replicated (a step of")]
    assert "over " in line
    assert "replicated reads" in line
