# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading rows of a checkpoint into tensors that exist."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from metrale_ray.errors import CheckpointError
from metrale_ray.model.safetensors_file import TensorRecord, read_header
from metrale_ray.model.tensor_reader import TensorReader

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def saved(folder: Path, tensor: torch.Tensor) -> TensorRecord:
    save_file({"before": torch.ones(3, dtype=torch.uint8), "w": tensor}, folder / "a.safetensors")
    return read_header(folder / "a.safetensors")[1]["w"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 9),
    columns=st.integers(0, 7),
    source=st.sampled_from(FLOATS),
    wanted=st.sampled_from(FLOATS),
    staging_bytes=st.integers(1, 64),
    data=st.data(),
)
def test_any_rows_of_any_float_dtype_arrive_as_torch_would_convert_them(
    tmp_path: Path,
    rows: int,
    columns: int,
    source: torch.dtype,
    wanted: torch.dtype,
    staging_bytes: int,
    data: st.DataObject,
) -> None:
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(source)
    first = data.draw(st.integers(0, rows))
    count = data.draw(st.integers(0, rows - first))
    destination = torch.full((count, columns), float("nan"), dtype=wanted)
    with TensorReader(staging_bytes) as reader:
        reader.read_into(saved(tmp_path, tensor), destination, first)
    assert torch.equal(destination, tensor[first : first + count].to(wanted))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_tensor_without_dimensions_and_one_of_three_are_read(tmp_path: Path, wanted: torch.dtype) -> None:
    with TensorReader() as reader:
        scalar = torch.zeros((), dtype=wanted)
        reader.read_into(saved(tmp_path, torch.tensor(2.5)), scalar)
        assert scalar == 2.5
    with TensorReader() as reader:
        cube = torch.arange(24.0).reshape(2, 3, 4)
        destination = torch.zeros(1, 3, 4, dtype=wanted)
        reader.read_into(saved(tmp_path, cube), destination, 1)
        assert torch.equal(destination, cube[1:].to(wanted))


def test_a_read_fills_only_its_part_of_a_larger_tensor(tmp_path: Path) -> None:
    fused = torch.zeros(3, 4, 2)
    with TensorReader() as reader:
        reader.read_into(saved(tmp_path, torch.ones(2, 2)), fused[1, 2:])
    assert fused.sum() == 4
    assert fused[1, 2:].sum() == 4


def test_whole_numbers_are_read_into_the_same_dtype_only(tmp_path: Path) -> None:
    record = saved(tmp_path, torch.tensor([1, 2]))
    with TensorReader() as reader:
        destination = torch.zeros(2, dtype=torch.int64)
        reader.read_into(record, destination)
        assert destination.tolist() == [1, 2]
        with pytest.raises(CheckpointError, match=r"tensor w is I64, the model needs torch\.float32"):
            reader.read_into(record, torch.zeros(2))


def test_a_parameter_that_requires_a_gradient_can_be_filled(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    with TensorReader() as reader:
        reader.read_into(saved(tmp_path, torch.ones(2)), parameter)
    assert parameter.sum() == 2


@pytest.mark.parametrize("shape", [(3, 2), (6,), (), (2, 3, 1), (1, 2)])
def test_another_shape_is_refused_with_both_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    record = saved(tmp_path, torch.ones(2, 3))
    with TensorReader() as reader, pytest.raises(CheckpointError, match=r"a\.safetensors: tensor w has shape \[2, 3\]"):
        reader.read_into(record, torch.zeros(shape))


@pytest.mark.parametrize(("rows", "first"), [(3, 0), (2, 1), (1, 2), (1, -1)])
def test_rows_outside_of_the_tensor_are_refused(tmp_path: Path, rows: int, first: int) -> None:
    record = saved(tmp_path, torch.ones(2, 3))
    with TensorReader() as reader, pytest.raises(CheckpointError, match="tensor w has 2 rows, the model needs rows"):
        reader.read_into(record, torch.zeros(rows, 3), first)


def test_a_destination_that_is_not_contiguous_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    record = saved(tmp_path, torch.ones(2, 3))
    with TensorReader() as reader, pytest.raises(ValueError, match="not contiguous"):
        reader.read_into(record, torch.zeros(3, 2).T)


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    record = saved(tmp_path, torch.ones(2, 3).to(torch.float8_e4m3fn))
    with TensorReader() as reader, pytest.raises(CheckpointError, match="tensor w is F8_E4M3, which cannot be served"):
        reader.read_into(record, torch.zeros(2, 3))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_file_that_shrinks_after_it_was_checked_is_an_error_and_not_zeros(
    tmp_path: Path, wanted: torch.dtype
) -> None:
    record = saved(tmp_path, torch.ones(2, 3))
    os.truncate(record.file, record.offset + 5)
    with TensorReader() as reader, pytest.raises(CheckpointError, match=f"{record.file} is truncated.*tensor w"):
        reader.read_into(record, torch.zeros(2, 3, dtype=wanted))


def test_a_folder_in_the_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    record = saved(tmp_path, torch.ones(2, 3))
    record.file.unlink()
    record.file.mkdir()
    with TensorReader() as reader, pytest.raises(CheckpointError, match="cannot read tensor w: Is a directory"):
        reader.read_into(record, torch.zeros(2, 3))


def test_closing_lets_go_of_every_file(tmp_path: Path) -> None:
    record = saved(tmp_path, torch.ones(2, 3))
    before = len(os.listdir("/proc/self/fd"))
    reader = TensorReader()
    reader.read_into(record, torch.zeros(2, 3))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
