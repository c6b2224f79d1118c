# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Int8Product`: rows times a quantised matrix, in PyTorch: the plain form that native kernels are compared with.

Rules. The rows stay as they are, the items are widened, products are added in fp32, and each output is scaled once, at
the end. Weights are widened tile by tile, so that a tile is multiplied while it is still in the cache.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from metrale_ray.model.layers.linear import TILE_ITEMS
from metrale_ray.model.quantization.int8 import Quantised


class Int8Product:
    """Keeps one tile of scratch; one thread at a time."""

    def __init__(self, tile_items: int = TILE_ITEMS) -> None:
        self._tile = torch.empty(tile_items, dtype=torch.float32)

    def __call__(self, x_TI: torch.Tensor, weight: Quantised, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """[T, O] of the rows' dtype."""
        num_outputs, num_inputs = weight.items.shape
        if self._tile.numel() < num_inputs:
            self._tile = self._tile.new_empty(num_inputs)
        rows_each = self._tile.numel() // max(num_inputs, 1)
        wide_IT = x_TI.float().t()
        out_OT = torch.empty(num_outputs, x_TI.shape[0], dtype=torch.float32)
        for start in range(0, num_outputs, rows_each):
            part_OI = weight.items[start : start + rows_each]
            tile_OI = self._tile[: part_OI.numel()].view(part_OI.shape).copy_(part_OI)
            torch.mm(tile_OI, wide_IT, out=out_OT[start : start + rows_each])
        out_OT.mul_(weight.scales[:, None])
        if bias_O is not None:
            out_OT.add_(bias_O.float()[:, None])
        return out_OT.t().to(x_TI.dtype, memory_format=torch.contiguous_format)
