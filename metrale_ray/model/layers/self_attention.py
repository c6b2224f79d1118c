# SPDX-License-Identifier: MIT OR Apache-2.0
"""One layer's attention: projections, norms of queries and keys, rotation, the attention itself, output projection.

Shapes: T rows, H hidden, N query heads, M kv heads, D head_dim; q, k and v are one matrix [(N + 2·M)·D, H].
"""

from __future__ import annotations

from typing import Any

import torch

from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.layers.linear import Product
from metrale_ray.model.layers.norm import rms_norm
from metrale_ray.model.layers.rotary import rotate
from metrale_ray.model.step import Step


class SelfAttention:
    """The same on every rank; no collective."""

    def __init__(
        self,
        layer: int,
        config: DecoderConfig,
        weights: dict[str, torch.Tensor],
        attention: Attention[Any],
        product: Product,
    ) -> None:
        self._layer = layer
        self._window = config.windows[layer]
        self._num_heads = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._qkv = weights["qkv"]
        self._qkv_bias = weights.get("qkv_bias")
        self._output = weights["output"]
        self._output_bias = weights.get("output_bias")
        self._norm_RD = weights.get("head_norms")
        self._attention = attention
        self._product = product

    def __call__(self, x_TH: torch.Tensor, step: Step) -> torch.Tensor:
        """The attention's output [T, H], without the residual."""
        num_rows = x_TH.shape[0]
        qkv = self._product(x_TH, self._qkv, self._qkv_bias).view(num_rows, -1, self._head_dim)
        rotated = qkv[:, : self._num_rotated]
        if self._norm_RD is not None:
            rotated = rms_norm(rotated, self._norm_RD, self._eps)
        rotated = rotate(rotated, step.cos, step.sin)
        q_TND, k_TMD = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        plan = step.attention[self._window]
        out_TND = self._attention(self._layer, q_TND, k_TMD, qkv[:, self._num_rotated :], plan)
        return self._product(out_TND.reshape(num_rows, -1), self._output, self._output_bias)


def join_head_norms(config: DecoderConfig, weights: dict[str, torch.Tensor]) -> None:
    """Replace each layer's `q_norm` and `k_norm` by `head_norms`, one per rotated head [N + M, D].

    Queries and keys are then normalised together; and the tensors in use are those that the rank's weights name.
    """
    for layer in range(config.num_layers) if config.qk_norm else ():
        q_ND = weights.pop(f"layers.{layer}.q_norm").expand(config.num_heads, -1)
        k_MD = weights.pop(f"layers.{layer}.k_norm").expand(config.num_kv_heads, -1)
        weights[f"layers.{layer}.head_norms"] = torch.cat((q_ND, k_MD))
