# SPDX-License-Identifier: MIT OR Apache-2.0
"""The gated mlp of a dense layer. Shapes: T tokens, H hidden, I intermediate; gate and up are one matrix [2·I, H]."""

from __future__ import annotations

import torch

from metrale_ray.model.kernels.kernels import GatedMlp
from metrale_ray.model.layers.activation import Activation
from metrale_ray.model.layers.linear import Product


class TorchMlp(GatedMlp):
    """The same on every rank; no collective. `weights` has `gate_up` and `down`, and their biases where there are."""

    def __init__(self, weights: dict[str, torch.Tensor], activation: Activation, product: Product) -> None:
        self._gate_up = weights["gate_up"]
        self._gate_up_bias = weights.get("gate_up_bias")
        self._down = weights["down"]
        self._down_bias = weights.get("down_bias")
        self._activation = activation
        self._product = product

    def __call__(self, x_TH: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """See GatedMlp."""
        gate_TI, up_TI = self._product(x_TH, self._gate_up, self._gate_up_bias).chunk(2, dim=-1)
        return add_to.add_(self._product(self._activation(gate_TI) * up_TI, self._down, self._down_bias))
