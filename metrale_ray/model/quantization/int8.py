# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Quantised`: weight matrices in 8 bits, and how they come from rows of floats.

Rules. Symmetric, one scale per output, and nothing of the activations: an item is its weight over its row's scale,
rounded to the nearest integer, to the even one on a tie; the scale is the row's largest magnitude over 127. A weight is
then off by at most half a scale. Of a row of which a rank holds some columns, the scale is still the whole row's: what
is computed does not depend on the number of ranks. A row that is all but zero is zero, with scale 0; one with a value
that is no finite number has such a scale, so that its output shows it.

Leaves out: where they lie (kernels/layout.py), products with them (product.py).

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 127
# Below this a row's scale would come near the numbers that fp32 holds with few bits.
LEAST_MAGNITUDE = 2.0**-100
NAMES = ("qkv", "output", "gate_up", "down")
"""The parameters that are quantised, in a layer and among its experts. Others decide too much, or are small."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Items [.., O, I], int8, and scales [.., O], fp32."""

    items: torch.Tensor
    scales: torch.Tensor

    def unbind(self) -> list[Quantised]:
        """Each matrix of the first dimension."""
        return [Quantised(*both) for both in zip(self.items.unbind(0), self.scales.unbind(0), strict=True)]

    def floats(self) -> torch.Tensor:
        """The weights that these stand for, fp32 [.., O, I]."""
        return self.items.float() * self.scales[..., None]


def is_quantised(parameter: str) -> bool:
    """Whether this parameter of a shard plan is one that int8 is for."""
    return parameter.rpartition(".")[2] in NAMES


def scales_of(parameter: str) -> str:
    """The name of the scales of a quantised parameter, which is a parameter of its own."""
    return f"{parameter}_scales"


def row_scales(rows_RI: torch.Tensor) -> torch.Tensor:
    """The scale of each row, fp32 [R]."""
    if rows_RI.shape[1] == 0:
        return rows_RI.new_zeros(len(rows_RI), dtype=torch.float32)
    largest_R = rows_RI.abs().amax(dim=1).float()
    return torch.where(largest_R < LEAST_MAGNITUDE, 0.0, largest_R / LARGEST)


def quantised_rows(rows_RI: torch.Tensor, scales_R: torch.Tensor) -> torch.Tensor:
    """Rows, or some columns of them, in steps of their scales: int8 [R, I]."""
    divisors_R = torch.where(scales_R > 0, scales_R, torch.inf)
    return torch.nan_to_num(rows_RI.float() / divisors_R[:, None], nan=0.0).round_().to(torch.int8)


def quantise(weight: torch.Tensor) -> Quantised:
    """Whole matrices [.., O, I]."""
    rows_RI = weight.reshape(-1, weight.shape[-1])
    scales_R = row_scales(rows_RI)
    return Quantised(quantised_rows(rows_RI, scales_R).view(weight.shape), scales_R.view(weight.shape[:-1]))
