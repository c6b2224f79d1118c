# SPDX-License-Identifier: MIT OR Apache-2.0
"""The strict reading of one safetensors header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from metrale_ray.errors import CheckpointError
from metrale_ray.model.safetensors_file import MAX_HEADER_BYTES, read_header


def write(file: Path, header: str | bytes | dict[str, Any], data: bytes = b"") -> Path:
    if isinstance(header, dict):
        header = json.dumps(header)
    content = header.encode() if isinstance(header, str) else header
    file.write_bytes(len(content).to_bytes(8, "little") + content + data)
    return file


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_a_file_of_the_reference_library_is_read_with_absolute_offsets(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    weights = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.tensor([7], dtype=torch.int64), "z": torch.zeros(0, 2)}
    save_file(weights, file, metadata={"format": "pt"})
    header, records = read_header(file)
    content = file.read_bytes()
    assert content[8 : 8 + len(header)] == header
    assert records.keys() == weights.keys()
    for name, record in records.items():
        assert record.shape == tuple(weights[name].shape)
        data = content[record.offset : record.offset + record.num_bytes]
        assert data == weights[name].numpy().tobytes()


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "a", "{}"))[1] == {}


@pytest.mark.parametrize("content", [b"", b"\x01", b"\x00" * 7])
def test_a_file_too_short_for_a_header_is_truncated(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    assert "is truncated" in refusal(tmp_path / "a")


def test_a_file_cut_in_its_header_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes((1000).to_bytes(8, "little") + b"{}")
    assert "its header has 1000 bytes, 2 are there" in refusal(tmp_path / "a")


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    assert "is not a safetensors file" in refusal(tmp_path / "a")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "a")


@pytest.mark.parametrize("header", ["", "{", "nonsense", b"\xff\xfe", "[" * 200_000, '{"a": ' + "1" * 5000 + "}"])
def test_a_header_that_is_not_json_is_damaged(tmp_path: Path, header: str | bytes) -> None:
    assert "damaged safetensors header" in refusal(write(tmp_path / "a", header))


def test_a_header_that_is_not_an_object_is_damaged(tmp_path: Path) -> None:
    assert "not a JSON object" in refusal(write(tmp_path / "a", "[]"))


@pytest.mark.parametrize("metadata", [[], {"a": 1}, "x"])
def test_metadata_must_be_texts(tmp_path: Path, metadata: Any) -> None:
    assert "__metadata__" in refusal(write(tmp_path / "a", {"__metadata__": metadata}))


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry(0, 4, [1]))
    assert "more than once: w" in refusal(write(tmp_path / "a", f'{{"w": {one}, "w": {one}}}', bytes(4)))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"dtype": "F32", "shape": [1]}, "must have dtype, shape and data_offsets"),
        (entry(0, 4, [1]) | {"more": 1}, "and nothing else"),
        ([], "must have dtype"),
        (entry(0, 4, [1], "F33"), "unknown dtype 'F33'"),
        (entry(0, 4, [1]) | {"dtype": ["F32"]}, "unknown dtype"),
        (entry(0, 4, [-1]), "not a list of sizes"),
        (entry(0, 4, [1.0]), "not a list of sizes"),
        (entry(0, 4, [True]), "not a list of sizes"),
        (entry(0, 4, [1]) | {"shape": "1"}, "not a list of sizes"),
        (entry(4, 0, [1]), "not [begin, end]"),
        (entry(0, 4, [1]) | {"data_offsets": [0, 4, 8]}, "not [begin, end]"),
        (entry(0, 4, [1]) | {"data_offsets": [0, "4"]}, "not [begin, end]"),
        (entry(0, 4, [2]), "takes 8 bytes, the header gives 4"),
        (entry(0, 4, [2**40, 2**40]), "the header gives 4"),
    ],
)
def test_a_damaged_entry_is_refused_with_its_tensor(tmp_path: Path, bad: Any, reason: str) -> None:
    message = refusal(write(tmp_path / "a", {"w": bad}, bytes(4)))
    assert "tensor w" in message
    assert reason in message


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {"v": entry(0, 8, [2]), "w": entry(4, 12, [2])}
    assert "tensor w: it starts at byte" in refusal(write(tmp_path / "a", header, bytes(12)))


def test_a_hole_between_or_before_tensors_is_refused(tmp_path: Path) -> None:
    assert "tensor w" in refusal(write(tmp_path / "a", {"v": entry(0, 8, [2]), "w": entry(12, 16, [1])}, bytes(16)))
    assert "leaves a hole" in refusal(write(tmp_path / "a", {"w": entry(4, 8, [1])}, bytes(8)))


def test_data_that_is_too_short_names_the_first_tensor_cut_off(tmp_path: Path) -> None:
    header = {"v": entry(0, 8, [2]), "w": entry(8, 16, [2])}
    assert "first tensor cut off is w" in refusal(write(tmp_path / "a", header, bytes(15)))
    assert "first tensor cut off is v" in refusal(write(tmp_path / "a", header, bytes(3)))


def test_data_behind_the_last_tensor_is_refused(tmp_path: Path) -> None:
    assert "1 bytes behind its last tensor" in refusal(write(tmp_path / "a", {"v": entry(0, 8, [2])}, bytes(9)))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_a_changed_byte_or_cut_is_accepted_only_where_the_reference_library_accepts_it(
    tmp_path: Path, data: st.DataObject
) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(2, 3), "y": torch.ones(4, dtype=torch.float16)}, file)
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        records = read_header(file)[1]
    except CheckpointError:
        return
    try:
        with safe_open(file, "pt") as reference:
            assert set(reference.keys()) == records.keys()
            assert all(reference.get_slice(name).get_shape() == list(records[name].shape) for name in records)
    except SafetensorError as error:
        pytest.fail(f"accepted what the reference library refuses: {error}")
