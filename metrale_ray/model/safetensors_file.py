# SPDX-License-Identifier: MIT OR Apache-2.0
"""The header of one safetensors file: which tensors it holds, and where.

Format (https://github.com/huggingface/safetensors#format): a little-endian u64 `n`, `n` bytes of JSON, then the data.
The JSON maps each tensor's name to its dtype, shape and `[begin, end)` in the data, and `__metadata__` to texts.

Rules: the header is checked in full before any of it is believed. Names are unique; dtypes are known; the size of each
tensor is what its dtype and shape say; the tensors cover the data without a hole or an overlap; the file is as long
as the header says, to the byte. Every fault is a CheckpointError that names the file and, where one is at fault, the
tensor. Nothing here reads tensor data.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale_ray.errors import CheckpointError
from metrale_ray.model.excerpt import excerpt

# The limit of the format's reference implementation; a header of 30 000 tensors takes about 4 MB.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
METADATA = "__metadata__"
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a checkpoint. `offset` counts bytes from the start of `file`; `dtype` is the format's own name."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(file: Path) -> tuple[bytes, dict[str, TensorRecord]]:
    """The header's bytes and the file's tensors by name, in the order of their data. Raises CheckpointError."""
    header, file_bytes = _read_header_bytes(file)
    data_start = LENGTH_BYTES + len(header)
    entries = _parse(file, header)
    records = [_record(file, name, entry, data_start) for name, entry in entries.items()]
    records.sort(key=lambda record: (record.offset, record.num_bytes))
    _check_coverage(file, records, data_start, file_bytes)
    return header, {record.name: record for record in records}


def first_few(names: Iterable[str], limit: int = 5) -> str:
    """The first names in order, and how many more there are, for a message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, for `json.loads(object_pairs_hook=...)`. ValueError on a name that comes twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"a name comes more than once: {first_few(n for n, count in counts.items() if count > 1)}")
    return values


def _read_header_bytes(file: Path) -> tuple[bytes, int]:
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = stream.read(LENGTH_BYTES)
            if len(length) < LENGTH_BYTES:
                raise CheckpointError(f"{file} is truncated: {file_bytes} bytes do not hold a safetensors header")
            header_bytes = int.from_bytes(length, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file} is not a safetensors file: it claims a header of {header_bytes} bytes, "
                    f"at most {MAX_HEADER_BYTES} are allowed"
                )
            header = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    if len(header) < header_bytes:
        raise CheckpointError(f"{file} is truncated: its header has {header_bytes} bytes, {len(header)} are there")
    return header, file_bytes


def _parse(file: Path, header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged safetensors header: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} has a damaged safetensors header: it is not a JSON object")
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file} has a damaged safetensors header: {METADATA} must map names to texts")
    return entries


def _record(file: Path, name: str, entry: Any, data_start: int) -> TensorRecord:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, name, "it must have dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _damaged(file, name, f"unknown dtype {excerpt(dtype)}; known are {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape):
        raise _damaged(file, name, f"its shape is {excerpt(shape)}, which is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, name, f"its data_offsets are {excerpt(offsets)}, which is not [begin, end]")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise _damaged(file, name, f"shape {shape} of {dtype} takes {expected} bytes, the header gives {end - begin}")
    return TensorRecord(name, file, dtype, tuple(shape), data_start + begin, expected)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_coverage(file: Path, records: list[TensorRecord], data_start: int, file_bytes: int) -> None:
    position = data_start
    for record in records:
        if record.offset != position:
            kind = "overlaps the tensor before it" if record.offset < position else "leaves a hole before it"
            raise _damaged(file, record.name, f"it starts at byte {record.offset} and {kind}, which ends at {position}")
        position += record.num_bytes
    if file_bytes < position:
        cut = next(record.name for record in records if record.offset + record.num_bytes > file_bytes)
        raise CheckpointError(
            f"{file} is truncated: it has {file_bytes} of {position} bytes; the first tensor cut off is {cut}"
        )
    if file_bytes > position:
        raise CheckpointError(f"{file} has {file_bytes - position} bytes behind its last tensor; it must end there")


def _damaged(file: Path, name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{file}: tensor {name}: {reason}")
