# SPDX-License-Identifier: MIT OR Apache-2.0
"""`TensorReader`: reads rows of a checkpoint's tensors into tensors that exist already.

Rules: a read goes straight into the destination (preadv, no memory map), so loading takes the memory of the weights
and no more. Where the dtype differs, or the destination is not on the CPU, it goes through one staging buffer of a
fixed size. What cannot be read is a CheckpointError that names the file and the tensor.

Leaves out: machines that are not little-endian, as the format is; quantised dtypes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from metrale_ray.errors import CheckpointError
from metrale_ray.model.safetensors_file import DTYPE_BYTES, TensorRecord

# Large enough that the system calls cost nothing, small beside any model.
STAGING_BYTES = 16 * 2**20
# Rows that are packed at once: they are still in the cache then. Whole blocks of outputs where a tensor has as many.
ROWS_BYTES = 2**19
ROWS_STEP = 16
TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class TensorReader:
    """Open files of a checkpoint, one descriptor each. Use it in a `with`; one thread at a time."""

    def __init__(self, staging_bytes: int = STAGING_BYTES) -> None:
        if sys.byteorder != "little":
            raise CheckpointError("safetensors files are little-endian and this machine is not")
        self._staging_bytes = max(staging_bytes, max(DTYPE_BYTES.values()))
        self._staging: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and drop the staging buffer. Calling it twice is allowed."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        self._staging = None
        self._rows = None

    def read_into(self, record: TensorRecord, destination: torch.Tensor, first_row: int = 0) -> None:
        """Fill `destination`, which must be contiguous, with rows of the tensor.

        It reads `destination.shape[0]` rows of the first dimension from `first_row` on; the other dimensions must be
        equal. A tensor without dimensions goes into a destination without dimensions. Floats are converted to the
        destination's float dtype; other dtypes must be equal. Raises CheckpointError; ValueError when the destination
        is not contiguous.
        """
        if not destination.is_contiguous():
            raise ValueError(f"the destination of {record.name} is not contiguous")
        source_dtype = _check_dtype(record, destination.dtype)
        _check_shape(record, destination, first_row)
        flat = destination.detach().view(-1)
        offset = record.offset + first_row * _row_bytes(record)
        if source_dtype == flat.dtype and flat.device.type == "cpu":
            self._read(record, flat, offset)
        else:
            self._read_staged(record, flat, offset, source_dtype)

    def read_rows(
        self, record: TensorRecord, width: int, first_row: int, num_rows: int, dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Consecutive rows of `width` items in `dtype`, some [R, width] at a time, valid until the next ones.

        The tensor counts as one of rows of its last dimension, which is `width`. Raises CheckpointError.
        """
        source_dtype = _check_dtype(record, dtype)
        if not record.shape or record.shape[-1] != width:
            raise CheckpointError(
                f"{record.file}: tensor {record.name} has shape {list(record.shape)}, the model needs rows of {width}"
            )
        row_bytes = width * source_dtype.itemsize
        rows_each = max(1, ROWS_BYTES // max(row_bytes, 1) // ROWS_STEP * ROWS_STEP)
        staging = self._rows_buffer(rows_each * width, source_dtype)
        for start in range(0, num_rows, rows_each):
            count = min(rows_each, num_rows - start)
            flat = staging[: count * width]
            self._read(record, flat, record.offset + (first_row + start) * row_bytes)
            yield flat.view(count, width).to(dtype)

    def _rows_buffer(self, num_items: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = num_items * dtype.itemsize
        if self._rows is None or self._rows.numel() < num_bytes:
            self._rows = torch.empty(num_bytes, dtype=torch.uint8)
        return self._rows[:num_bytes].view(dtype)

    def _read_staged(self, record: TensorRecord, flat: torch.Tensor, offset: int, source_dtype: torch.dtype) -> None:
        if self._staging is None:
            self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8)
        item_bytes = source_dtype.itemsize
        num_items = self._staging_bytes // item_bytes
        staging = self._staging[: num_items * item_bytes].view(source_dtype)
        for start in range(0, flat.numel(), num_items):
            part = flat[start : start + num_items]
            self._read(record, staging[: part.numel()], offset + start * item_bytes)
            part.copy_(staging[: part.numel()])

    def _read(self, record: TensorRecord, flat: torch.Tensor, offset: int) -> None:
        """Fill the whole of the one-dimensional CPU tensor from `offset` on."""
        target = flat.view(torch.uint8).numpy().data
        descriptor = self._descriptor(record)
        done = 0
        while done < len(target):
            try:
                count = os.preadv(descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{record.file}: cannot read tensor {record.name}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{record.file} is truncated: it ends at byte {offset + done}, inside tensor {record.name}"
                )
            done += count

    def _descriptor(self, record: TensorRecord) -> int:
        if record.file not in self._descriptors:
            try:
                self._descriptors[record.file] = os.open(record.file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{record.file}: cannot read tensor {record.name}: {error.strerror}") from error
        return self._descriptors[record.file]


def _check_dtype(record: TensorRecord, wanted: torch.dtype) -> torch.dtype:
    source = TORCH_DTYPES.get(record.dtype)
    if source is None:
        raise CheckpointError(
            f"{record.file}: tensor {record.name} is {record.dtype}, which cannot be served; "
            "convert the checkpoint to BF16, F16 or F32"
        )
    if source != wanted and not (source.is_floating_point and wanted.is_floating_point):
        raise CheckpointError(f"{record.file}: tensor {record.name} is {record.dtype}, the model needs {wanted}")
    return source


def _check_shape(record: TensorRecord, destination: torch.Tensor, first_row: int) -> None:
    wanted = tuple(destination.shape)
    if len(wanted) != len(record.shape) or wanted[1:] != record.shape[1:]:
        raise CheckpointError(
            f"{record.file}: tensor {record.name} has shape {list(record.shape)}, "
            f"the model needs {list(wanted)} (the first dimension may be a part)"
        )
    num_rows = record.shape[0] if record.shape else 1
    end = first_row + (wanted[0] if wanted else 1)
    if first_row < 0 or end > num_rows:
        raise CheckpointError(
            f"{record.file}: tensor {record.name} has {num_rows} rows, the model needs rows {first_row} to {end}"
        )


def _row_bytes(record: TensorRecord) -> int:
    num_rows = record.shape[0] if record.shape else 1
    return record.num_bytes // max(num_rows, 1)
