# SPDX-License-Identifier: MIT OR Apache-2.0
"""A checkpoint: its configuration and a table of all its tensors, checked before anything is loaded.

Which files count, as in transformers where that is unambiguous:

- `model.safetensors`, or the shards that `model.safetensors.index.json` names. Both together are accepted only when
  they hold the same tensors (names, dtypes, shapes and the first bytes of each); then the single file is read.
- A shard named in the index must be there, must hold the tensors that the index puts in it and no others. A
  `model-*-of-*.safetensors` that the index does not name is refused, and so are shards without an index.
- Other safetensors files (`consolidated`, `model.fp16`, adapters) are not read. Pickle files are never opened, whatever
  else is there: unpickling runs code. Code in the folder (`auto_map`) is never imported.

Every fault is a CheckpointError that names the file and the tensor, the first few of many and their count. Leaves out:
which tensors a family needs, and the data itself (`TensorReader`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale_ray.errors import CheckpointError
from metrale_ray.model.excerpt import excerpt
from metrale_ray.model.families.config_reader import MAX_COUNT
from metrale_ray.model.hub import locate
from metrale_ray.model.safetensors_file import TensorRecord, first_few, read_header, unique_keys
from metrale_ray.model.tensor_reader import TensorReader

__all__ = ["Checkpoint", "TensorReader", "TensorRecord", "open_checkpoint"]

log = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Two checkpoints of one architecture differ in the first values of nearly every tensor.
COMPARED_BYTES = 4096
# What ranks compare of each file's data: some milliseconds even from a network drive, and no training step of a model
# leaves 64 pieces of it as they were.
NUM_SAMPLES, SAMPLE_BYTES = 64, 1024

Headers = dict[Path, tuple[bytes, dict[str, TensorRecord]]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint. `path` is its folder; `tensors` is by name.

    `digests` has one entry for each file read, by its name, and ranks compare them at the start: config.json whole; of
    weights the header, and samples of the data all over the file, so that another training of one architecture shows.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorRecord]
    digests: dict[str, str]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The token ids that end a text: generation_config.json's, else config.json's; one, several or none."""
        named = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        if named is None:
            return frozenset()
        return frozenset(named if isinstance(named, list) else [named])


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Find and check the checkpoint of `model`, a folder or a hub id (`owner/name`, with an optional revision).

    Raises ConfigError when there is no such model, CheckpointError when it cannot be served.
    """
    folder = locate(model, revision)
    config_bytes, config = _read_json(folder / CONFIG)
    has_generation = os.path.lexists(folder / GENERATION_CONFIG)
    generation_bytes, generation = _read_json(folder / GENERATION_CONFIG) if has_generation else (b"", {})
    for file, values in ((CONFIG, config), (GENERATION_CONFIG, generation)):
        _check_eos(folder / file, values.get("eos_token_id"))
    headers = _read_headers(folder)
    tensors = {name: record for _, records in headers.values() for name, record in records.items()}
    digests = {CONFIG: _digest(config_bytes), GENERATION_CONFIG: _digest(generation_bytes)}
    digests |= {file.name: _digest(header, *_samples(file)) for file, (header, _) in headers.items()}
    return Checkpoint(folder, config, generation, tensors, digests)


def _read_json(file: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = file.read_bytes()
        values = json.loads(content, object_pairs_hook=unique_keys)
    except FileNotFoundError as error:
        if file.is_symlink():
            raise CheckpointError(f"{file} is a link to {file.readlink()}, which is not there") from error
        raise CheckpointError(f"{file.parent} is not a checkpoint: it has no {file.name}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not a {type(values).__name__}")
    return content, values


def _check_eos(file: Path, value: Any) -> None:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id <= MAX_COUNT for token_id in ids):
        raise CheckpointError(f"{file}: eos_token_id is {excerpt(value)}; it must be a token id or a list of them")


def _read_headers(folder: Path) -> Headers:
    """The headers of the files that make up the checkpoint, in the order of their names."""
    sharded = _read_shards(folder)
    if not (folder / SINGLE).is_file() or (folder / SINGLE) in sharded:
        if not sharded:
            raise _no_weights(folder)
        return sharded
    single = {folder / SINGLE: _read_one(folder / SINGLE)}
    if sharded:
        _check_same(folder, single, sharded)
    return single


def _read_shards(folder: Path) -> Headers:
    """The headers of the shards, checked against the index; empty when there is neither an index nor a shard."""
    found = {file.name for file in folder.glob(SHARDS)}
    if not os.path.lexists(folder / INDEX):
        if found and not (folder / SINGLE).is_file():
            raise CheckpointError(
                f"{folder} has {len(found)} shard(s) ({first_few(found)}) and no {INDEX}, so what should be there is "
                f"not known; add the index, or rename a file that is the whole model to {SINGLE}"
            )
        return {folder / name: _read_one(folder / name) for name in sorted(found)}
    weight_map = _read_weight_map(folder / INDEX)
    named = set(weight_map.values())
    missing = {name for name in named if not (folder / name).is_file()}
    if missing:
        affected = [tensor for tensor, name in weight_map.items() if name in missing]
        raise CheckpointError(
            f"{folder / INDEX} names {len(missing)} file(s) that are missing: {first_few(missing)}; with them "
            f"{len(affected)} tensor(s) are missing: {first_few(affected)}{_left_overs(folder)}"
        )
    if found - named:
        raise CheckpointError(
            f"{folder} has {len(found - named)} shard(s) that {INDEX} does not name: {first_few(found - named)}; "
            "remove them, or use the index that belongs to them"
        )
    headers = {folder / name: _read_one(folder / name) for name in sorted(named)}
    _check_index(folder, weight_map, headers)
    return headers


def _read_weight_map(file: Path) -> dict[str, str]:
    weight_map = _read_json(file)[1].get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map from tensors to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{file} puts tensor {tensor} into {excerpt(name)}; it must be a .safetensors file beside the index"
            )
    return weight_map


def _check_index(folder: Path, weight_map: dict[str, str], headers: Headers) -> None:
    """Every tensor is in exactly the file that the index says."""
    places: dict[str, list[str]] = {}
    for file, (_, records) in headers.items():
        for tensor in records:
            places.setdefault(tensor, []).append(file.name)
    twice = [tensor for tensor, files in places.items() if len(files) > 1]
    _refuse(folder, twice, "more than one shard holds", lambda tensor: f"{tensor} (in {', '.join(places[tensor])})")
    absent = [tensor for tensor in weight_map if tensor not in places]
    _refuse(folder, absent, f"{INDEX} names, and no shard holds,", lambda t: f"{t} (expected in {weight_map[t]})")
    unnamed = [tensor for tensor in places if tensor not in weight_map]
    _refuse(folder, unnamed, f"{INDEX} does not name", lambda tensor: f"{tensor} (in {places[tensor][0]})")
    wrong = [tensor for tensor, name in weight_map.items() if places[tensor] != [name]]
    _refuse(
        folder, wrong, f"{INDEX} gives the wrong shard for", lambda t: f"{t} ({weight_map[t]}, it is in {places[t][0]})"
    )


def _refuse(folder: Path, tensors: list[str], what: str, describe: Any) -> None:
    if tensors:
        raise CheckpointError(f"{folder}: {what} {len(tensors)} tensor(s): {first_few(map(describe, tensors))}")


def _read_one(file: Path) -> tuple[bytes, dict[str, TensorRecord]]:
    try:
        return read_header(file)
    except CheckpointError as error:
        left_overs = _left_overs(file.parent)
        if not left_overs:
            raise
        raise CheckpointError(error.message + left_overs) from error


def _left_overs(folder: Path) -> str:
    """A hint at an interrupted download: its files lie in the folder, or in the hub cache around it."""
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    names = [file.name for place in places for file in place.glob("*.incomplete")]
    return f"; an interrupted download left {first_few(names)}, download again" if names else ""


def _check_same(folder: Path, single: Headers, sharded: Headers) -> None:
    """Refuse a single file and shards that are not the same model."""
    one = {name: record for _, records in single.values() for name, record in records.items()}
    other = {name: record for _, records in sharded.values() for name, record in records.items()}
    unlike = [name for name in one.keys() | other.keys() if not _look_alike(one.get(name), other.get(name))]
    if unlike:
        raise CheckpointError(
            f"{folder} has {SINGLE} and shards, and {len(unlike)} tensor(s) differ between them: {first_few(unlike)}; "
            "remove the one that does not belong to the model"
        )
    log.info("%s has %s and shards of the same model; the single file is read", folder, SINGLE)


def _look_alike(one: TensorRecord | None, other: TensorRecord | None) -> bool:
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return _first_bytes(one) == _first_bytes(other)


def _first_bytes(record: TensorRecord) -> bytes:
    try:
        with record.file.open("rb") as stream:
            return os.pread(stream.fileno(), min(COMPARED_BYTES, record.num_bytes), record.offset)
    except OSError as error:
        raise CheckpointError(f"{record.file}: cannot read tensor {record.name}: {error.strerror}") from error


def _no_weights(folder: Path) -> CheckpointError:
    names = {file.name for file in folder.iterdir() if file.is_file()}
    pickled = {name for name in names if name.endswith(PICKLE_SUFFIXES)}
    others = {name for name in names if name.endswith((".safetensors", ".gguf"))}
    if pickled:
        reason = (
            f"; it has {first_few(pickled)}, and pickle files are never opened, because opening one can run code "
            f"from it. Convert them to safetensors (save_pretrained in transformers, on a machine that trusts them)"
        )
    elif others:
        reason = f"; it has {first_few(others)}, which is not a whole model in this format"
    else:
        reason = ""
    return CheckpointError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}{reason}{_left_overs(folder)}")


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """The file's length, and pieces of it at even distances, its end among them."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            yield size.to_bytes(8, "little")
            last = max(0, size - SAMPLE_BYTES)
            for number in range(NUM_SAMPLES):
                yield os.pread(stream.fileno(), SAMPLE_BYTES, last * (number + 1) // NUM_SAMPLES)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
