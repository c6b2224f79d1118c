# SPDX-License-Identifier: MIT OR Apache-2.0
"""The plain kernels, in PyTorch: for any device and dtype, and the reference for all others."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic

import torch

from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.experts.local import TorchExperts
from metrale_ray.model.experts.router import route
from metrale_ray.model.kernels.kernels import Embedding, GatedMlp, Kernels, Linear, Norm, Rotation, Router
from metrale_ray.model.kernels.layout import Plain
from metrale_ray.model.layers.activation import ACTIVATIONS
from metrale_ray.model.layers.linear import Product, Weight, choose_product
from metrale_ray.model.layers.mlp import TorchMlp
from metrale_ray.model.layers.norm import rms_norm
from metrale_ray.model.layers.rotary import rotate
from metrale_ray.model.quantization.int8 import Quantised, scales_of
from metrale_ray.model.quantization.product import Int8Product


class TorchLinear(Linear, Generic[Weight]):
    """By the fastest of PyTorch's products."""

    def __init__(self, product: Product[Weight], weight_OI: Weight, bias_O: torch.Tensor | None, is_wide: bool) -> None:
        self._product: Product[Weight] = product
        self._weight_OI: Weight = weight_OI
        self._bias_O = bias_O
        self._is_wide = is_wide

    def __call__(self, x_TI: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See Linear."""
        out_TO = self._product(x_TI, self._weight_OI, self._bias_O)
        if add_to is not None:
            return add_to.add_(out_TO)
        return out_TO.float() if self._is_wide else out_TO


class TorchKernels(Kernels):
    """PyTorch's operations on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_quantised: bool = False) -> None:
        self.layout = Plain(is_quantised=is_quantised)
        self._product = choose_product(device, dtype)
        self._int8 = Int8Product()

    def embedding(self, weight: torch.Tensor, shape: tuple[int, int], *, is_matrix: bool) -> Embedding:
        """See Kernels."""
        return partial(torch.index_select, weight, 0)

    def linear(
        self,
        weight: torch.Tensor,
        shape: tuple[int, int],
        bias_O: torch.Tensor | None = None,
        *,
        is_wide: bool = False,
        scales: torch.Tensor | None = None,
    ) -> Linear:
        """See Kernels."""
        if scales is None:
            return TorchLinear(self._product, weight, bias_O, is_wide)
        return TorchLinear(self._int8, Quantised(weight, scales), bias_O, is_wide)

    def norm(self, weight_H: torch.Tensor, eps: float) -> Norm:
        """See Kernels."""
        return partial(rms_norm, weight=weight_H, eps=eps)

    def rotation(self, norms_RD: torch.Tensor | None, eps: float, num_rotated: int, head_dim: int) -> Rotation:
        """See Kernels."""

        def turn(qkv_TXD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
            rotated_TRD = qkv_TXD[:, :num_rotated]
            if norms_RD is not None:
                rotated_TRD = rms_norm(rotated_TRD, norms_RD, eps)
            qkv_TXD[:, :num_rotated] = rotate(rotated_TRD, cos_T1D, sin_T1D)
            return qkv_TXD

        return turn

    def gated_mlp(
        self, weights: dict[str, torch.Tensor], hidden_size: int, inner_size: int, activation: str
    ) -> GatedMlp:
        """See Kernels."""
        biases = weights.get("gate_up_bias"), weights.get("down_bias")
        gate_up, down = weights["gate_up"], weights["down"]
        if scales_of("down") not in weights:
            return TorchMlp(gate_up, down, biases, ACTIVATIONS[activation], self._product)
        gate_up_quantised = Quantised(gate_up, weights[scales_of("gate_up")])
        down_quantised = Quantised(down, weights[scales_of("down")])
        return TorchMlp(gate_up_quantised, down_quantised, biases, ACTIVATIONS[activation], self._int8)

    def router(self, weight: torch.Tensor, hidden_size: int, moe: MoeConfig) -> Router:
        """See Kernels."""
        return lambda x_TH: route(self._product(x_TH, weight, None), moe)

    def experts(
        self,
        mine: range,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        hidden_size: int,
        moe: MoeConfig,
        activation: str,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> TorchExperts[Any]:
        """See Kernels."""
        if scales is None:
            return TorchExperts(mine, gate_up, down, ACTIVATIONS[activation], self._product, moe.num_experts)
        quantised = Quantised(gate_up, scales[0]), Quantised(down, scales[1])
        return TorchExperts(mine, *quantised, ACTIVATIONS[activation], self._int8, moe.num_experts)
