# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Layout`: how a rank's parameters lie in memory, and how a checkpoint's rows get there.

Rules. Parameters have logical shapes, which the shard plan gives; a layout says what tensors hold each. `Plain` holds
them as they are. `Packed` holds matrices as native kernels read them: blocks of 16 outputs, each with its inputs one
after another (see native/src/product.h); gate and up of one parameter are two matrices. Only matrices are packed, and
only some of them quantised, which names tell, never shapes. A quantised parameter is held by its 8-bit items, under
its own name, and by their scales, under `scales_of` it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from ctypes import byref
from typing import NamedTuple

import torch

from metrale_ray.model.quantization.int8 import is_quantised, quantised_rows, row_scales, scales_of
from metrale_ray.model.safetensors_file import TensorRecord
from metrale_ray.model.shard_plan import EMBEDDING, HEAD, Piece, Shape
from metrale_ray.model.tensor_reader import TensorReader
from metrale_ray.native import library

MATRICES = ("qkv", "output", "gate_up", "down", "router")
ONE_THREAD = 1  # for a piece: several are packed at once
FORMATS = {torch.float32: library.FP32, torch.bfloat16: library.BF16, torch.int8: library.INT8}


class Stored(NamedTuple):
    """A tensor that holds a parameter, or a part of what is needed of it."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_matrix(parameter: str, *, is_tied: bool) -> bool:
    """Whether products are taken with this parameter of a shard plan. `is_tied`: the embedding is the output head."""
    return parameter.rpartition(".")[2] in MATRICES or parameter == HEAD or (parameter == EMBEDDING and is_tied)


class Layout(ABC):
    """Where the weights of one rank go. `is_quantised`: those that int8 is for are held as such."""

    def __init__(self, *, is_quantised: bool = False) -> None:
        self.is_quantised = is_quantised

    def tensors(self, parameter: str, shape: Shape, dtype: torch.dtype, *, is_tied: bool) -> dict[str, Stored]:
        """What holds a parameter of logical `shape`, by name."""
        if not (self.is_quantised and is_quantised(parameter)):
            return {parameter: Stored(self._shape(parameter, shape, dtype, is_tied=is_tied), dtype)}
        return {
            parameter: Stored(self._shape(parameter, shape, torch.int8, is_tied=is_tied), torch.int8),
            scales_of(parameter): Stored(self._scales_shape(parameter, shape), torch.float32),
        }

    def read(
        self,
        reader: TensorReader,
        record: TensorRecord,
        piece: Piece,
        shape: Shape,
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """Read `piece` of a parameter of logical `shape` into the tensors that hold it. Raises CheckpointError."""
        assert piece.parameter is not None, "a piece that is read has a parameter"
        stored, scales = weights[piece.parameter], weights.get(scales_of(piece.parameter))
        if stored.shape == shape and scales is None and piece.columns is None:
            reader.read_into(record, stored[piece.index] if piece.index else stored, piece.first_row)
            return
        # A piece without an index counts rows of its first dimension, which are whole experts where there are three.
        first_row = piece.first_row * math.prod(shape[1:-1])
        columns = slice(None) if piece.columns is None else slice(piece.columns.start, piece.columns.stop)
        read_as = _read_as(record, stored)
        stored_MOI = _flat(stored, 2)
        for matrix, output, num_rows in _runs(piece, shape, self._halves(piece.parameter)):
            for rows_RI in reader.read_rows(record, piece.shape[-1], first_row, num_rows, read_as):
                of_outputs = None if scales is None else _flat(scales, 1)[matrix]
                self._put(rows_RI, columns, stored_MOI[matrix], output, of_outputs)
                output += len(rows_RI)
            first_row += num_rows

    @abstractmethod
    def _put(
        self,
        rows_RI: torch.Tensor,
        columns: slice,
        matrix: torch.Tensor,
        first_output: int,
        scales: torch.Tensor | None,
    ) -> None:
        """Columns of whole rows, which have no gaps, as outputs from `first_output` on; quantised where there are
        scales, which are those of the whole rows."""

    @abstractmethod
    def _shape(self, parameter: str, shape: Shape, dtype: torch.dtype, *, is_tied: bool) -> Shape:
        """Of the tensor that holds a parameter's items."""

    @abstractmethod
    def _scales_shape(self, parameter: str, shape: Shape) -> Shape:
        """Of the scales of a quantised parameter."""

    @abstractmethod
    def _halves(self, parameter: str) -> int:
        """Into how many matrices one of the parameter is cut."""


class Plain(Layout):
    """Parameters as they are."""

    def _put(
        self,
        rows_RI: torch.Tensor,
        columns: slice,
        matrix: torch.Tensor,
        first_output: int,
        scales: torch.Tensor | None,
    ) -> None:
        outputs = slice(first_output, first_output + len(rows_RI))
        if scales is None:
            matrix[outputs] = rows_RI[:, columns]
            return
        scales[outputs] = row_scales(rows_RI)
        matrix[outputs] = quantised_rows(rows_RI[:, columns], scales[outputs])

    def _shape(self, parameter: str, shape: Shape, dtype: torch.dtype, *, is_tied: bool) -> Shape:
        return shape

    def _scales_shape(self, parameter: str, shape: Shape) -> Shape:
        return shape[:-1]

    def _halves(self, parameter: str) -> int:
        return 1


class Packed(Layout):
    """Matrices as native kernels read them: [matrices, blocks, items of a block], scales [matrices, padded outputs]."""

    def _put(
        self,
        rows_RI: torch.Tensor,
        columns: slice,
        matrix: torch.Tensor,
        first_output: int,
        scales: torch.Tensor | None,
    ) -> None:
        if scales is None:
            pack_rows(rows_RI[:, columns].contiguous(), matrix, first_output)
            return
        scales[first_output : first_output + len(rows_RI)] = row_scales(rows_RI)
        pack_quantised(rows_RI[:, columns], matrix, first_output, scales)

    def _shape(self, parameter: str, shape: Shape, dtype: torch.dtype, *, is_tied: bool) -> Shape:
        if not is_matrix(parameter, is_tied=is_tied):
            return shape
        *outer, outputs, inputs = shape
        halves = self._halves(parameter)
        return (math.prod(outer) * halves, *packed_shape(outputs // halves, inputs, dtype))

    def _scales_shape(self, parameter: str, shape: Shape) -> Shape:
        matrices, blocks, _ = self._shape(parameter, shape, torch.int8, is_tied=False)
        return matrices, blocks * library.BLOCK

    def _halves(self, parameter: str) -> int:
        return 2 if parameter.endswith("gate_up") else 1


def _read_as(record: TensorRecord, stored: torch.Tensor) -> torch.dtype:
    """The dtype that rows are read in; what is quantised comes from exactly what the file holds."""
    if stored.dtype != torch.int8:
        return stored.dtype
    return torch.bfloat16 if record.dtype == "BF16" else torch.float32


def _flat(tensor: torch.Tensor, num_dimensions: int) -> torch.Tensor:
    """Its last dimensions, and one of all others: one entry for each matrix."""
    return tensor.view(-1, *tensor.shape[tensor.dim() - num_dimensions :])


def packed_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, int]:
    """(blocks, items of a block) of a packed matrix."""
    step = library.STEPS[FORMATS[dtype]]
    return -(-outputs // library.BLOCK), -(-inputs // step) * step * library.BLOCK


def pack_rows(rows_RI: torch.Tensor, matrix: torch.Tensor, first_output: int) -> None:
    """Write rows without gaps, of the matrix's dtype, as outputs from `first_output` on into a packed matrix."""
    assert rows_RI.is_contiguous(), "rows have no gaps"
    kind = FORMATS[matrix.dtype]
    core = library.library()
    assert core is not None, "packed weights are for native kernels"
    core.mr_pack(
        rows_RI.data_ptr(),
        kind,
        first_output,
        len(rows_RI),
        rows_RI.shape[1],
        matrix.data_ptr(),
        ONE_THREAD,
    )


def pack_quantised(rows_RI: torch.Tensor, matrix: torch.Tensor, first_output: int, scales: torch.Tensor) -> None:
    """Write rows, or some columns of them, as outputs from `first_output` on, in steps of the scales of all outputs."""
    assert rows_RI.stride(1) == 1 or rows_RI.shape[1] <= 1, "a row has no gaps"
    core = library.library()
    assert core is not None, "packed weights are for native kernels"
    rows = library.Rows(rows_RI.data_ptr(), rows_RI.stride(0), len(rows_RI), FORMATS[rows_RI.dtype])
    core.mr_quantize(byref(rows), rows_RI.shape[1], first_output, scales.data_ptr(), matrix.data_ptr(), ONE_THREAD)


def packed(weight_OI: torch.Tensor) -> torch.Tensor:
    """A whole matrix, packed: [1, blocks, items of a block]."""
    outputs, inputs = weight_OI.shape
    stored = weight_OI.new_zeros((1, *packed_shape(outputs, inputs, weight_OI.dtype)))
    pack_rows(weight_OI.contiguous(), stored[0], 0)
    return stored


def _runs(piece: Piece, shape: Shape, halves: int) -> Iterator[tuple[int, int, int]]:
    """(matrix, first output, rows) of each run of rows that a piece fills, in the order of its rows."""
    *outer, outputs, _ = shape
    each = outputs // halves
    numbers = range(math.prod(outer))
    rows = slice(0, outputs)
    for index in piece.index:
        if isinstance(index, int):
            numbers = range(index, index + 1)
        else:
            rows = index
    for number in numbers:
        for half in range(halves):
            start, stop = max(rows.start, half * each), min(rows.stop, (half + 1) * each)
            if start < stop:
                yield number * halves + half, start - half * each, stop - start
