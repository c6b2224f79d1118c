# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Buffer`: the outputs of one native operation, kept from step to step, and rows as the native core takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from metrale_ray.model.kernels.layout import FORMATS
from metrale_ray.native.library import Rows

MAX_VIEWS = 512
MAX_KEPT_BYTES = 2**26  # what is larger, such as the logits of a whole prompt, is made anew each time


class Output(NamedTuple):
    """The first rows of a buffer, as a tensor and for the core."""

    tensor: torch.Tensor
    rows: Rows


class Buffer:
    """Rows [T, width] of `dtype` for whatever T. It grows to the largest; steps of a known size allocate nothing."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._full = torch.empty((0, width), dtype=dtype)
        self._outputs: dict[int, Output] = {}

    def output(self, num_rows: int) -> Output:
        """Its first rows. What an earlier output held is overwritten."""
        known = self._outputs.get(num_rows)
        return self._make(num_rows) if known is None else known

    def _make(self, num_rows: int) -> Output:
        if num_rows * self._full.stride(0) * self._full.itemsize > MAX_KEPT_BYTES:
            tensor = self._full.new_empty((num_rows, self._full.shape[1]))
            return Output(tensor, rows_of(tensor))
        if num_rows > len(self._full):
            self._full = self._full.new_empty((num_rows, self._full.shape[1]))
            self._outputs.clear()
        if len(self._outputs) >= MAX_VIEWS:
            self._outputs.clear()
        tensor = self._full[:num_rows]
        output = self._outputs[num_rows] = Output(tensor, rows_of(tensor))
        return output


def rows_of(x: torch.Tensor) -> Rows:
    """The rows of a tensor whose last dimensions have no gaps."""
    return Rows(x.data_ptr(), x.stride(0), x.shape[0], FORMATS[x.dtype])


def rows_into(out: torch.Tensor, rows: Rows) -> Rows:
    """The rows of `out`, which the core fills from `rows`. Raises ValueError unless there are as many."""
    if out.shape[0] != rows.count:
        raise ValueError(f"{rows.count} rows were given, and there is memory for {out.shape[0]} results")
    return rows_of(out)
