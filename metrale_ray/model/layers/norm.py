# SPDX-License-Identifier: MIT OR Apache-2.0
"""Root-mean-square norm (arXiv 1910.07467), computed in fp32 whatever the dtype."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` over its last dimension, rounded to its dtype before the weight is applied, as the reference does."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)
