# SPDX-License-Identifier: MIT OR Apache-2.0
"""Products with weight matrices.

The plain form is `functional.linear`. On a CPU a single row is a matrix-vector product, which torch runs faster. A CPU
without 16-bit arithmetic multiplies bfloat16 and float16 row by row, many times slower than fp32: there `WideProduct`
widens the weights to fp32, tile by tile, as soon as there are enough rows to pay for it, and rounds once at the end.
Which one is used follows from the device, the dtype and the number of rows, so all ranks of one kind choose alike.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn import functional

from metrale_ray.model.quantization.int8 import Quantised

Weight = TypeVar("Weight", torch.Tensor, Quantised)
# (rows [T, I], weight [O, I], bias [O] or None) -> [T, O]
Product = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]

# Below this many rows reading the weights once as they are is cheaper than widening them.
MIN_WIDE_ROWS = 4
# 4 MB of fp32: the widened tile is multiplied while it is still in the cache.
TILE_ITEMS = 2**20
# torch's vector level on CPUs that have no 16-bit arithmetic.
NARROW_CAPABILITIES = ("DEFAULT", "AVX2")


def choose_product(device: torch.device, dtype: torch.dtype) -> Product[torch.Tensor]:
    """The fastest product for weights of `dtype` on `device`."""
    if device.type != "cpu":
        return functional.linear
    if dtype == torch.float32:
        return cpu_product
    return WideProduct() if torch.backends.cpu.get_cpu_capability() in NARROW_CAPABILITIES else functional.linear


def cpu_product(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """One row as a matrix-vector product, more rows as they are."""
    if x_TI.shape[0] != 1:
        return functional.linear(x_TI, weight_OI, bias_O)
    x_I = x_TI[0]
    out_O = torch.mv(weight_OI, x_I) if bias_O is None else torch.addmv(bias_O, weight_OI, x_I)
    return out_O[None]


class WideProduct:
    """16-bit weights times 16-bit rows by way of fp32. Keeps one tile of scratch; one thread at a time."""

    def __init__(self, tile_items: int = TILE_ITEMS) -> None:
        self._tile = torch.empty(tile_items, dtype=torch.float32)

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        num_inputs = weight_OI.shape[1]
        rows_per_tile = self._tile.numel() // num_inputs
        if x_TI.shape[0] < MIN_WIDE_ROWS or rows_per_tile == 0:
            return cpu_product(x_TI, weight_OI, bias_O)
        wide_IT = x_TI.float().t()
        # Weights on the left: with few rows that product is up to twice as fast as the one with weights on the right.
        out_OT = torch.empty(weight_OI.shape[0], x_TI.shape[0], dtype=torch.float32)
        for start in range(0, weight_OI.shape[0], rows_per_tile):
            part_OI = weight_OI[start : start + rows_per_tile]
            tile_OI = self._tile[: part_OI.numel()].view(part_OI.shape).copy_(part_OI)
            torch.mm(tile_OI, wide_IT, out=out_OT[start : start + rows_per_tile])
        out_TO = out_OT.t().to(x_TI.dtype, memory_format=torch.contiguous_format)
        return out_TO if bias_O is None else out_TO.add_(bias_O)
