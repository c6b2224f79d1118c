# SPDX-License-Identifier: MIT OR Apache-2.0
"""One layer's attention: projections, norms of queries and keys, rotation, the attention itself, output projection.

Shapes: T rows, H hidden, N query heads, M kv heads, X = N + 2·M, D head_dim; q, k and v are one matrix [X·D, H].
"""

from __future__ import annotations

from typing import Any

import torch

from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.kernels.kernels import Kernels
from metrale_ray.model.step import Step


class SelfAttention:
    """The heads of `config`, all of the model's or one rank's share; no collective."""

    def __init__(
        self,
        layer: int,
        config: DecoderConfig,
        weights: dict[str, torch.Tensor],
        attention: Attention[Any],
        kernels: Kernels,
    ) -> None:
        num_rotated = config.num_heads + config.num_kv_heads
        num_all = num_rotated + config.num_kv_heads
        hidden, head_dim = config.hidden_size, config.head_dim
        self._layer = layer
        self._window = config.windows[layer]
        self._shape = num_all, head_dim
        self._qkv = kernels.linear(
            weights["qkv"], (num_all * head_dim, hidden), weights.get("qkv_bias"), scales=weights.get("qkv_scales")
        )
        self._turn = kernels.rotation(weights.get("head_norms"), config.rms_norm_eps, num_rotated, head_dim)
        self._attention = attention
        output_shape = hidden, config.num_heads * head_dim
        self._output = kernels.linear(
            weights["output"], output_shape, weights.get("output_bias"), scales=weights.get("output_scales")
        )

    def __call__(self, x_TH: torch.Tensor, step: Step, add_to: torch.Tensor) -> torch.Tensor:
        """Add the attention's output [T, H] to `add_to` in place, and give that back."""
        num_rows = x_TH.shape[0]
        qkv_TXD = self._turn(self._qkv(x_TH).view(num_rows, *self._shape), step.cos, step.sin)
        out_TND = self._attention(self._layer, qkv_TXD, step.attention[self._window])
        return self._output(out_TND.view(num_rows, -1), add_to)


def join_head_norms(config: DecoderConfig, weights: dict[str, torch.Tensor]) -> None:
    """Replace each layer's `q_norm` and `k_norm` by `head_norms`, one per rotated head [N + M, D].

    `config` has the rank's own heads. Queries and keys are then normalised together; and the tensors in use are those
    that the rank's weights name.
    """
    for layer in range(config.num_layers) if config.qk_norm and config.num_heads else ():
        q_ND = weights.pop(f"layers.{layer}.q_norm").expand(config.num_heads, -1)
        k_MD = weights.pop(f"layers.{layer}.k_norm").expand(config.num_kv_heads, -1)
        weights[f"layers.{layer}.head_norms"] = torch.cat((q_ND, k_MD))
