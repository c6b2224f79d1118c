# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank says of itself before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError, StartError
from metrale_ray.model import ranks
from metrale_ray.model.identity import versions
from metrale_ray.model.memory import memory
from metrale_ray.model.ranks import differences, introduce, open_rank
from metrale_ray.model.weights import kv_block_bytes, shard_bytes
from tests.model.test_memory import machine

TINY = Callable[[str], Path]


def config(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", **changes).resolved({})


def test_ranks_of_one_configuration_do_not_differ(tiny: TINY) -> None:
    hellos = [introduce(open_rank(config(tiny("qwen3"), ep_size=3), rank)) for rank in range(3)]
    assert [differences(hellos[0], hello) for hello in hellos] == [[], [], []]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dtype": "bfloat16"}, "dtype: rank 0 has 'torch.float32', rank 1 has 'torch.bfloat16'"),
        ({"block_size": 8}, "block_size: rank 0 has '16', rank 1 has '8'"),
        ({"max_batch_size": 5}, "max_batch_size: rank 0 has '32', rank 1 has '5'"),
        ({"max_model_len": 99}, "max_model_len: rank 0 has '1024', rank 1 has '99'"),
        ({"max_num_batched_tokens": 99}, "max_num_batched_tokens: rank 0 has '512', rank 1 has '99'"),
        ({"ep_protocol": "v1", "max_batch_size": 1}, "protocol: rank 0 has v2, rank 1 has v1"),
    ],
)
def test_each_setting_that_differs_is_named_with_both_values(tiny: TINY, changes: dict[str, Any], line: str) -> None:
    mine = introduce(open_rank(config(tiny("qwen3"), ep_size=2, dtype="float32"), 0))
    other = introduce(open_rank(config(tiny("qwen3"), ep_size=2, **{"dtype": "float32", **changes}), 1))
    assert line in differences(mine, other)


@pytest.mark.parametrize(
    ("name", "here", "there"),
    [("python", "3.11.4", "3.11.9"), ("ray", "2.60.0", "2.59.1"), ("torch", "2.13.0", "2.12.1")],
)
def test_each_version_that_differs_is_named_with_both_nodes_and_both_values(
    tiny: TINY, monkeypatch: pytest.MonkeyPatch, name: str, here: str, there: str
) -> None:
    hellos = []
    for rank, version in enumerate((here, there)):
        monkeypatch.setattr(ranks, "versions", lambda version=version: {**versions(), name: version})
        hellos.append(introduce(open_rank(config(tiny("qwen3"), ep_size=2), rank, f"10.0.0.{rank + 1}")))
    line = f"{name}: rank 0 on 10.0.0.1 has '{here}', rank 1 on 10.0.0.2 has '{there}'"
    assert differences(*hellos) == [line]


def test_another_checkpoint_is_a_difference(tiny: TINY) -> None:
    mine, other = (introduce(open_rank(config(tiny(v), ep_size=2), 0)) for v in ("qwen3", "qwen3, 5 experts"))
    assert any(line.startswith("file model.safetensors: rank 0 has") for line in differences(mine, other))


def test_a_difference_names_the_nodes_where_they_are_known(tiny: TINY) -> None:
    mine = introduce(open_rank(config(tiny("qwen3"), ep_size=2, block_size=32), 0, "10.0.0.1"))
    other = introduce(open_rank(config(tiny("qwen3"), ep_size=2), 1, "10.0.0.2"))
    assert differences(mine, other) == ["block_size: rank 0 on 10.0.0.1 has '32', rank 1 on 10.0.0.2 has '16'"]


def test_a_given_cache_size_is_kept_to_the_block(tiny: TINY) -> None:
    setup = open_rank(config(tiny("qwen3"), dtype="float32"), 0)
    block_bytes = kv_block_bytes(setup.decoder, 16, torch.float32)
    for num_blocks in (1, 7, 20):
        given = config(tiny("qwen3"), dtype="float32", kv_cache_memory=num_blocks * block_bytes + block_bytes - 1)
        assert introduce(open_rank(given, 0)).num_blocks == num_blocks


def test_no_more_blocks_are_taken_than_all_slots_can_fill(tiny: TINY) -> None:
    given = config(tiny("qwen3"), max_batch_size=3, max_model_len=33, kv_cache_memory=2**30)
    assert introduce(open_rank(given, 0)).num_blocks == 3 * 3


def test_a_default_cache_keeps_to_what_the_process_own_control_group_leaves(
    tiny: TINY, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = open_rank(config(tiny("qwen3"), dtype="float32", ep_size=2, kernels="torch"), 0)
    shard = shard_bytes(setup.checkpoint, setup.decoder, 0, 2, torch.float32)
    block_bytes = kv_block_bytes(setup.decoder, 16, torch.float32)
    left = 2 * shard + 2 * 2 * 5 * block_bytes  # two ranks take half of the rest, five blocks each
    machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/memory.max": f"{left}\n",
            "sys/fs/cgroup/user/job/memory.current": "0\n",
        },
    )
    monkeypatch.setattr(ranks, "memory", lambda: memory(tmp_path))
    assert introduce(setup).num_blocks == 5


def test_a_cache_too_small_for_one_block_is_refused_with_both_sizes(tiny: TINY) -> None:
    with pytest.raises(StartError, match=r"has 100 bytes for its KV cache and one block of 16 tokens takes \d+"):
        introduce(open_rank(config(tiny("qwen3"), kv_cache_memory=100), 0))


def test_more_positions_than_the_model_knows_are_refused(tiny: TINY) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 2000; this model knows positions up to 1024"):
        open_rank(config(tiny("qwen3"), max_model_len=2000), 0)
