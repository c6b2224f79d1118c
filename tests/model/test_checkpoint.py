# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which checkpoints are accepted, and what is said of the others."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from metrale_ray.errors import CheckpointError, ConfigError
from metrale_ray.model.checkpoint import Checkpoint, TensorReader, open_checkpoint

INDEX = "model.safetensors.index.json"
SHARDS = {
    "model-00001-of-00002.safetensors": ["embed", "layer.0"],
    "model-00002-of-00002.safetensors": ["layer.1", "norm"],
}
WEIGHTS = {
    "embed": torch.arange(40.0).reshape(10, 4),
    "layer.0": torch.full((4, 4), 2.0),
    "layer.1": torch.full((4, 4), 3.0),
    "norm": torch.ones(4),
}


def write_single(folder: Path, weights: dict[str, torch.Tensor] = WEIGHTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_shards(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    for name, tensors in SHARDS.items():
        save_file({tensor: WEIGHTS[tensor] for tensor in tensors}, folder / name)
    write_index(folder, {tensor: name for name, tensors in SHARDS.items() for tensor in tensors})
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change_index(folder: Path, **changes: str) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, weight_map | changes)


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    read = {}
    with TensorReader() as reader:
        for name, record in checkpoint.tensors.items():
            read[name] = torch.empty(record.shape)
            reader.read_into(record, read[name])
    return read


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    return str(caught.value)


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_whole_checkpoint_gives_its_configuration_and_every_tensor(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    folder = write(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config == {"model_type": "tiny"}
    assert checkpoint.generation_config == {"eos_token_id": 7}
    assert checkpoint.path == tmp_path
    read = values(checkpoint)
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[name], WEIGHTS[name]) for name in WEIGHTS)


def test_without_a_generation_config_it_is_empty(tmp_path: Path) -> None:
    assert open_checkpoint(str(write_single(tmp_path))).generation_config == {}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, {5}),
        ({"eos_token_id": [5, 6]}, {}, {5, 6}),
        ({"eos_token_id": 5}, {"eos_token_id": [7]}, {7}),
        ({"eos_token_id": 5}, {"temperature": 1.0}, {5}),
        ({"eos_token_id": 5}, {"eos_token_id": None}, set()),
        ({}, {"eos_token_id": None}, set()),
    ],
)
def test_the_ids_that_end_a_text_are_those_of_the_generation_config_if_it_names_any(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]
) -> None:
    write_single(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(str(tmp_path)).eos_token_ids == expected


@pytest.mark.parametrize("value", ["x", -1, True, [1, None], {}, 1.0, 2**31, [10**400]])
def test_an_end_of_text_that_is_no_token_id_is_refused(tmp_path: Path, value: Any) -> None:
    write_single(tmp_path)
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
        assert f"{name}: eos_token_id is" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_link_to_a_file_that_is_not_there_is_refused_and_not_taken_for_absent(tmp_path: Path, name: str) -> None:
    write_single(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=f"{name} is a link to ../blobs/gone, which is not there"):
        open_checkpoint(str(tmp_path))


def test_the_digests_are_those_of_any_copy_and_others_for_another_header_configuration_or_value(tmp_path: Path) -> None:
    first = open_checkpoint(str(write_single(tmp_path / "a"))).digests
    assert open_checkpoint(str(write_single(tmp_path / "b"))).digests == first
    others = {
        "c": WEIGHTS | {"norm": torch.ones(5)},
        "d": {name: tensor + 1 for name, tensor in WEIGHTS.items()},
    }
    for folder, weights in others.items():
        other = open_checkpoint(str(write_single(tmp_path / folder, weights))).digests
        assert [name for name in first if other[name] != first[name]] == ["model.safetensors"]
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "b" / name).write_text('{"model_type": "other"}')
        other = open_checkpoint(str(tmp_path / "b")).digests
        assert name in [file for file in first if other[file] != first[file]]


def test_a_missing_or_broken_configuration_is_refused(tmp_path: Path) -> None:
    write_single(tmp_path)
    for content, expected in [("{", "not valid JSON"), ("[]", "must hold a JSON object"), ("\xff", "not valid JSON")]:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        assert expected in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in refusal(tmp_path)


def test_code_named_in_the_configuration_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    write_single(tmp_path / "model")
    (tmp_path / "model" / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Evil"}}))
    assert open_checkpoint(str(tmp_path / "model")).tensors.keys() == WEIGHTS.keys()
    assert not marker.exists()


class Bomb:
    """Unpickling one writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "adapter_model.bin"])
def test_pickled_weights_are_refused_with_advice_and_never_opened(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    message = refusal(folder)
    assert name in message
    assert "Convert them to safetensors" in message
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "the bomb must be able to go off, or the test shows nothing"


def test_safetensors_win_over_pickled_weights_beside_them(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = write_single(tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    assert open_checkpoint(str(folder)).tensors.keys() == WEIGHTS.keys()
    assert not marker.exists()


def test_a_folder_without_weights_is_refused_with_what_it_has(tmp_path: Path) -> None:
    write_single(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    message = refusal(tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert "adapter_model.safetensors" in message
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "has no weights" in refusal(tmp_path)


def test_a_missing_shard_is_refused_with_the_tensors_that_go_with_it(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(tmp_path)
    assert "names 1 file(s) that are missing: model-00002-of-00002.safetensors" in message
    assert "2 tensor(s) are missing: layer.1, norm" in message


def test_an_interrupted_download_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "f00.incomplete")
    assert "interrupted download left f00.incomplete" in refusal(tmp_path)


def test_an_interrupted_download_in_the_hub_cache_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "snapshots" / "abc")
    (tmp_path / "blobs").mkdir()
    (folder / "model-00002-of-00002.safetensors").rename(tmp_path / "blobs" / "f00.incomplete")
    (folder / "model-00002-of-00002.safetensors").symlink_to(tmp_path / "blobs" / "f00")
    message = refusal(folder)
    assert "model-00002-of-00002.safetensors" in message
    assert "f00.incomplete" in message


def test_a_truncated_shard_is_refused_with_the_first_tensor_cut_off(tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    (tmp_path / "f00.incomplete").touch()
    message = refusal(tmp_path)
    assert f"{shard} is truncated" in message
    assert "layer.0" in message
    assert "f00.incomplete" in message


def test_an_index_that_puts_a_tensor_into_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    change_index(write_shards(tmp_path), norm="model-00001-of-00002.safetensors")
    assert "wrong shard for 1 tensor(s): norm (model-00001-of-00002.safetensors, it is in" in refusal(tmp_path)


def test_an_index_that_names_a_tensor_of_no_shard_is_refused(tmp_path: Path) -> None:
    change_index(write_shards(tmp_path), extra="model-00001-of-00002.safetensors")
    assert "no shard holds, 1 tensor(s): extra (expected in model-00001-of-00002.safetensors)" in refusal(tmp_path)


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"layer.1": WEIGHTS["layer.1"], "norm": WEIGHTS["norm"], "x": torch.ones(1)}, tmp_path / list(SHARDS)[1])
    assert "does not name 1 tensor(s): x (in model-00002-of-00002.safetensors)" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({**{n: WEIGHTS[n] for n in ("layer.1", "norm")}, "embed": WEIGHTS["embed"]}, tmp_path / list(SHARDS)[1])
    assert "more than one shard holds 1 tensor(s): embed" in refusal(tmp_path)


def test_a_shard_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"y": torch.ones(1)}, tmp_path / "model-00003-of-00003.safetensors")
    assert "1 shard(s) that model.safetensors.index.json does not name: model-00003-of-00003" in refusal(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    assert "has 2 shard(s)" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["../other.safetensors", "a/b.safetensors", "weights.bin", 3, None, ["x"]])
def test_an_index_may_only_name_safetensors_files_beside_it(tmp_path: Path, place: Any) -> None:
    write_single(tmp_path / "other.safetensors")
    folder = write_shards(tmp_path / "model")
    change_index(folder, norm=place)
    assert "it must be a .safetensors file beside the index" in refusal(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{", '{"a": 1, "a": 2}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refusal(tmp_path)


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    write_single(tmp_path)
    write_index(tmp_path, dict.fromkeys(WEIGHTS, "model.safetensors"))
    assert open_checkpoint(str(tmp_path)).tensors.keys() == WEIGHTS.keys()


def test_a_single_file_wins_over_equal_shards(tmp_path: Path) -> None:
    write_single(write_shards(tmp_path))
    assert {record.file.name for record in open_checkpoint(str(tmp_path)).tensors.values()} == {"model.safetensors"}
    (tmp_path / INDEX).unlink()
    assert {record.file.name for record in open_checkpoint(str(tmp_path)).tensors.values()} == {"model.safetensors"}


@pytest.mark.parametrize(
    "other",
    [
        WEIGHTS | {"norm": torch.zeros(4)},
        WEIGHTS | {"norm": torch.ones(4, dtype=torch.float16)},
        WEIGHTS | {"norm": torch.ones(2, 2)},
        {name: tensor for name, tensor in WEIGHTS.items() if name != "norm"},
    ],
)
def test_a_single_file_and_shards_that_differ_are_refused(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    write_single(write_shards(tmp_path), other)
    message = refusal(tmp_path)
    assert "1 tensor(s) differ between them: norm" in message


def test_a_single_file_beside_an_index_with_missing_shards_is_refused(tmp_path: Path) -> None:
    write_single(write_shards(tmp_path))
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "missing: model-00001-of-00002.safetensors" in refusal(tmp_path)


def test_many_faults_are_listed_as_the_first_few_and_a_count(tmp_path: Path) -> None:
    change_index(write_shards(tmp_path), **{f"ghost.{i:02}": next(iter(SHARDS)) for i in range(30)})
    message = refusal(tmp_path)
    assert "30 tensor(s): ghost.00" in message
    assert "ghost.04" in message
    assert "ghost.05" not in message
    assert "and 25 more" in message


def test_other_safetensors_files_are_not_read(tmp_path: Path) -> None:
    write_single(tmp_path)
    for name in ("consolidated", "model.fp16", "adapter_model"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"not one")
    assert open_checkpoint(str(tmp_path)).tensors.keys() == WEIGHTS.keys()


def test_a_name_that_is_neither_a_folder_nor_a_hub_id_says_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no folder {tmp_path}/nothing, and it is not a hub id"):
        open_checkpoint("nothing")
    with pytest.raises(ConfigError, match="no folder /no/such/folder"):
        open_checkpoint("/no/such/folder")
    write_single(tmp_path)
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        open_checkpoint("config.json")


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a revision is for a hub id only"):
        open_checkpoint(str(write_single(tmp_path)), "main")


def test_a_folder_that_vanishes_after_it_was_checked_is_a_checkpoint_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_single(tmp_path / "model")))
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CheckpointError, match="cannot read tensor"):
        values(checkpoint)
