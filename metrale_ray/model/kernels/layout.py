# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Layout`: how a rank's parameters lie in memory, and how a checkpoint's rows get there.

Rules. Parameters have logical shapes, which the shard plan gives; a layout says what tensor holds each. `Plain` holds
them as they are. `Packed` holds matrices as native kernels read them: blocks of 16 outputs, each with its inputs one
after another (see native/src/product.h); gate and up of one parameter are two matrices. Only matrices are packed, which
names tell, never shapes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from metrale_ray.model.safetensors_file import TensorRecord
from metrale_ray.model.shard_plan import EMBEDDING, HEAD, Piece, Shape
from metrale_ray.model.tensor_reader import TensorReader
from metrale_ray.native import library

MATRICES = ("qkv", "output", "gate_up", "down", "router")
FORMATS = {torch.float32: library.FP32, torch.bfloat16: library.BF16}


def is_matrix(parameter: str, *, is_tied: bool) -> bool:
    """Whether products are taken with this parameter of a shard plan. `is_tied`: the embedding is the output head."""
    return parameter.rpartition(".")[2] in MATRICES or parameter == HEAD or (parameter == EMBEDDING and is_tied)


class Layout(ABC):
    """Where the weights of one rank go."""

    @abstractmethod
    def stored_shape(self, parameter: str, shape: Shape, dtype: torch.dtype, *, is_tied: bool) -> Shape:
        """The shape of the tensor that holds a parameter of logical `shape`."""

    @abstractmethod
    def read(
        self, reader: TensorReader, record: TensorRecord, piece: Piece, shape: Shape, stored: torch.Tensor
    ) -> None:
        """Read `piece` of a parameter of logical `shape` into the tensor that holds it. Raises CheckpointError."""


class Plain(Layout):
    """Parameters as they are."""

    def stored_shape(self, parameter: str, shape: Shape, dtype: torch.dtype, *, is_tied: bool) -> Shape:
        """See Layout."""
        return shape

    def read(
        self, reader: TensorReader, record: TensorRecord, piece: Piece, shape: Shape, stored: torch.Tensor
    ) -> None:
        """See Layout."""
        reader.read_into(record, stored[piece.index] if piece.index else stored, piece.first_row)


class Packed(Layout):
    """Matrices as native kernels read them."""

    def stored_shape(self, parameter: str, shape: Shape, dtype: torch.dtype, *, is_tied: bool) -> Shape:
        """See Layout: [matrices, blocks, items of a block] for a matrix."""
        if not is_matrix(parameter, is_tied=is_tied):
            return shape
        *outer, outputs, inputs = shape
        halves = _halves(parameter)
        return (math.prod(outer) * halves, *packed_shape(outputs // halves, inputs, dtype))

    def read(
        self, reader: TensorReader, record: TensorRecord, piece: Piece, shape: Shape, stored: torch.Tensor
    ) -> None:
        """See Layout."""
        assert piece.parameter is not None, "a piece that is read has a parameter"
        if stored.shape == shape:
            Plain().read(reader, record, piece, shape, stored)
            return
        # A piece without an index counts rows of its first dimension, which are whole experts where there are three.
        first_row = piece.first_row * math.prod(shape[1:-1])
        for matrix, output, num_rows in _runs(piece, shape, _halves(piece.parameter)):
            for rows_RI in reader.read_rows(record, shape[-1], first_row, num_rows, stored.dtype):
                pack_rows(rows_RI, stored[matrix], output)
                output += len(rows_RI)
            first_row += num_rows


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
        kind,
        matrix.data_ptr(),
        None,
        torch.get_num_threads(),
    )


def packed(weight_OI: torch.Tensor) -> torch.Tensor:
    """A whole matrix, packed: [1, blocks, items of a block]."""
    outputs, inputs = weight_OI.shape
    stored = weight_OI.new_zeros((1, *packed_shape(outputs, inputs, weight_OI.dtype)))
    pack_rows(weight_OI.contiguous(), stored[0], 0)
    return stored


def _halves(parameter: str) -> int:
    return 2 if parameter.endswith("gate_up") else 1


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
