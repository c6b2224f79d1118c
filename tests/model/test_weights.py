# SPDX-License-Identifier: MIT OR Apache-2.0
"""Shard plans and loading: every layout, every fault, each rank its share and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from metrale_ray.errors import CheckpointError
from metrale_ray.model import tensor_reader
from metrale_ray.model.checkpoint import Checkpoint, open_checkpoint
from metrale_ray.model.kv_cache import kv_block_bytes
from metrale_ray.model.weights import load_weights, plan_weights, read_decoder_config, shard_bytes
from tests.fixtures.group import CPU, Group
from tests.fixtures.tiny import FAMILIES, random_prompt

Tensors = dict[str, torch.Tensor]
TINY = Callable[[str], Path]
VARIANT = {"mixtral": "mixtral", "qwen3_moe": "qwen3, mixed layers"}
SQUARE = ("mixtral", "qwen3", "qwen3, as wide inside", "qwen3, mixed layers")  # 2·I = hidden, or I = hidden


def rewrite(source: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a checkpoint whose tensors were changed."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def fuse(tensors: Tensors) -> None:
    """Rename and stack the experts as transformers 5 holds them in memory."""
    found: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name in list(tensors):
        moved = name.replace(".block_sparse_moe.", ".mlp.")
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight", moved)
        if match:
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(match[3], match[3])
            found.setdefault((match[1], part), {})[int(match[2])] = tensors.pop(name)
        elif moved != name:
            tensors[moved] = tensors.pop(name)
    stacked = {key: torch.stack([parts[number] for number in sorted(parts)]) for key, parts in found.items()}
    for (prefix, part), tensor in stacked.items():
        if part == "down_proj":
            tensors[f"{prefix}.down_proj"] = tensor
        elif part == "gate_proj":
            tensors[f"{prefix}.gate_up_proj"] = torch.cat((tensor, stacked[prefix, "up_proj"]), dim=1)


def check(folder: Path, rank: int = 0, world: int = 1) -> None:
    checkpoint = open_checkpoint(str(folder))
    plan_weights(checkpoint, read_decoder_config(checkpoint), rank, world)


def load(checkpoint: Checkpoint, rank: int, world: int, dtype: torch.dtype = torch.float32) -> Tensors:
    plan = plan_weights(checkpoint, read_decoder_config(checkpoint), rank, world)
    return load_weights(plan, checkpoint.tensors, CPU, dtype, lambda done, total: None)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("variant", SQUARE)
def test_experts_apart_and_fused_give_the_same_bits(variant: str, world: int, tiny: TINY, tmp_path: Path) -> None:
    fused, prompt = rewrite(tiny(variant), tmp_path / "fused", fuse), random_prompt(12)
    assert torch.equal(Group(fused, world).prompt(0, prompt), Group(tiny(variant), world).prompt(0, prompt))


def test_transposed_fused_experts_are_refused(tiny: TINY, tmp_path: Path) -> None:
    def transpose(tensors: Tensors) -> None:
        fuse(tensors)
        for name in tensors:
            if ".experts." in name:
                tensors[name] = tensors[name].transpose(1, 2)

    for variant in SQUARE:
        folder = rewrite(tiny(variant), tmp_path / variant.replace(" ", ""), transpose)
        with pytest.raises(CheckpointError, match="another shape"):
            check(folder)


@pytest.mark.parametrize("variant", ["mixtral, 5 experts", "qwen3, mixed layers", "qwen3, tied", "mixtral, 2 experts"])
def test_the_ranks_together_hold_each_expert_once_and_rank_0_alone_the_head(variant: str, tiny: TINY) -> None:
    checkpoint = open_checkpoint(str(tiny(variant)))
    whole, shards = load(checkpoint, 0, 1), [load(checkpoint, rank, 4) for rank in range(4)]
    for name, tensor in whole.items():
        if ".experts." in name:
            assert torch.equal(torch.cat([shard[name] for shard in shards]), tensor)
        elif name in ("final_norm", "head"):
            assert torch.equal(shards[0][name], tensor)
            assert all(name not in shard for shard in shards[1:])
        else:
            assert all(torch.equal(shard[name], tensor) for shard in shards)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_bytes_are_those_that_are_loaded(family: str, dtype: torch.dtype, tiny: TINY) -> None:
    checkpoint = open_checkpoint(str(tiny(VARIANT[family])))
    config = read_decoder_config(checkpoint)
    for rank in range(3):
        weights = load(checkpoint, rank, 3, dtype)
        loaded = sum(tensor.numel() * tensor.itemsize for tensor in weights.values())
        assert shard_bytes(checkpoint, config, rank, 3, dtype) == loaded
    assert kv_block_bytes(config, 16, dtype) == 16 * config.num_layers * 2 * 2 * 16 * dtype.itemsize


def test_a_rank_reads_only_its_share_and_progress_ends_at_its_total(
    tiny: TINY, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(tiny("mixtral")))
    read_names: list[str] = []
    plain = tensor_reader.TensorReader.read_into

    def read_into(self: tensor_reader.TensorReader, record: object, *rest: object) -> None:
        read_names.append(record.name)  # type: ignore[attr-defined]
        plain(self, record, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_reader.TensorReader, "read_into", read_into)
    plan = plan_weights(checkpoint, read_decoder_config(checkpoint), 1, 4)
    progress: list[tuple[int, int]] = []
    load_weights(plan, checkpoint.tensors, CPU, torch.float32, lambda done, total: progress.append((done, total)))
    experts = {int(found[1]) for name in read_names if (found := re.search(r"experts\.(\d+)\.", name))}
    assert experts == {2, 3}
    assert not {"model.norm.weight", "lm_head.weight"} & set(read_names)
    total = sum(checkpoint.tensors[name].num_bytes for name in read_names)
    assert progress[0] == (0, total)
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)
    assert len(progress) == len(read_names) + 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "lost",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "experts.7",
        "gate.weight",
    ],
)
def test_a_missing_tensor_is_named_on_every_rank(family: str, lost: str, tiny: TINY, tmp_path: Path) -> None:
    variant = {"mixtral": "mixtral", "qwen3_moe": "qwen3"}[family]
    gone: list[str] = []

    def drop(tensors: Tensors) -> None:
        gone.append(next(name for name in sorted(tensors) if lost in name))
        del tensors[gone[0]]

    folder = rewrite(tiny(variant), tmp_path / "lost", drop)
    for rank in range(3):
        with pytest.raises(CheckpointError, match=re.escape(f"1 tensor(s) missing from the checkpoint: {gone[0]}")):
            check(folder, rank, 3)


def test_many_missing_tensors_are_counted_and_only_the_first_few_named(tiny: TINY, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if "experts.3" in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=re.escape("9 tensor(s) missing")) as caught:
        check(rewrite(tiny("mixtral"), tmp_path / "lost", drop))
    assert len(caught.value.message) < 600


def test_no_experts_at_all_are_refused(tiny: TINY, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match="no experts under a known name"):
        check(rewrite(tiny("qwen3"), tmp_path / "lost", drop))


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.mlp.experts.8.gate_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "surprise",
    ],
)
def test_an_extra_tensor_is_refused_with_its_file(extra: str, tiny: TINY, tmp_path: Path) -> None:
    folder = rewrite(tiny("qwen3"), tmp_path / "extra", lambda tensors: tensors.update({extra: torch.zeros(24, 48)}))
    with pytest.raises(CheckpointError, match=re.escape(f"not part of this model: {extra} in {folder}")):
        check(folder, 1, 2)


def test_an_expert_in_a_dense_layer_and_a_second_layout_are_refused(tiny: TINY, tmp_path: Path) -> None:
    dense = "model.layers.0.mlp.experts.0.gate_proj.weight"
    folder = rewrite(tiny("qwen3, mixed layers"), tmp_path / "a", lambda t: t.update({dense: torch.zeros(24, 48)}))
    with pytest.raises(CheckpointError, match="not part of this model"):
        check(folder)

    def add_fused(tensors: Tensors) -> None:
        fused = dict(tensors)
        fuse(fused)
        tensors.update({name: tensor for name, tensor in fused.items() if name.endswith(".experts.down_proj")})

    with pytest.raises(CheckpointError, match="not part of this model"):
        check(rewrite(tiny("qwen3"), tmp_path / "b", add_fused))


def test_a_head_of_its_own_in_a_tied_model_is_checked_and_read_by_rank_0_alone(tiny: TINY, tmp_path: Path) -> None:
    def add(shape: tuple[int, int]) -> Callable[[Tensors], None]:
        return lambda tensors: tensors.update({"lm_head.weight": torch.ones(shape)})

    folder = rewrite(tiny("qwen3, tied"), tmp_path / "tied", add((320, 48)))
    shards = [load(open_checkpoint(str(folder)), rank, 2) for rank in range(2)]
    assert torch.equal(shards[0]["head"], torch.ones(320, 48))
    assert "head" not in shards[1]
    with pytest.raises(CheckpointError, match=re.escape("is [320, 47], expected [320, 48]")):
        check(rewrite(tiny("qwen3, tied"), tmp_path / "narrow", add((320, 47))), 1, 2)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_wrong_shape_or_dtype_of_any_ranks_expert_is_refused_on_every_rank(
    rank: int, tiny: TINY, tmp_path: Path
) -> None:
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"

    def turn(tensors: Tensors) -> None:
        tensors[name] = tensors[name].T

    with pytest.raises(CheckpointError, match=re.escape("is [24, 48], expected [48, 24]")):
        check(rewrite(tiny("mixtral"), tmp_path / "shape", turn), rank, 4)

    def retype(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(torch.int32)

    with pytest.raises(CheckpointError, match=f"{name} in .* is I32"):
        check(rewrite(tiny("mixtral"), tmp_path / "dtype", retype), rank, 4)


def test_a_checkpoint_in_another_dtype_is_converted_while_it_is_read(tiny: TINY, tmp_path: Path) -> None:
    def round_all(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.bfloat16)

    folder = rewrite(tiny("qwen3"), tmp_path / "bf16", round_all)
    wide = load(open_checkpoint(str(folder)), 0, 2, torch.float32)
    narrow = load(open_checkpoint(str(tiny("qwen3"))), 0, 2, torch.bfloat16)
    assert all(torch.equal(wide[name], narrow[name].float()) for name in wide)
