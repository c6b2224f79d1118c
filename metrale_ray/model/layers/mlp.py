# SPDX-License-Identifier: MIT OR Apache-2.0
"""The gated mlp of a dense layer. Shapes: T tokens, H hidden, I intermediate; gate and up are one matrix [2·I, H]."""

from __future__ import annotations

from typing import Generic

import torch

from metrale_ray.model.kernels.kernels import GatedMlp
from metrale_ray.model.layers.activation import Activation
from metrale_ray.model.layers.linear import Product, Weight


class TorchMlp(GatedMlp, Generic[Weight]):
    """The same on every rank; no collective. `biases`: those of gate and up, and of down."""

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        activation: Activation,
        product: Product[Weight],
    ) -> None:
        self._gate_up: Weight = gate_up
        self._down: Weight = down
        self._gate_up_bias, self._down_bias = biases
        self._activation = activation
        self._product: Product[Weight] = product

    def __call__(self, x_TH: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """See GatedMlp."""
        gate_TI, up_TI = self._product(x_TH, self._gate_up, self._gate_up_bias).chunk(2, dim=-1)
        return add_to.add_(self._product(self._activation(gate_TI) * up_TI, self._down, self._down_bias))
