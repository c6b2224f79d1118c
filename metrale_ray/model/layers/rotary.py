# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the halves form, with its scaling kinds.

- linear: all frequencies divided by `factor`.
- llama3: low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1).
- yarn: the same idea with a ramp over dimensions, and cos and sin times `attention_factor` (arXiv 2309.00071).

Angles are computed in fp32 and rounded last. Shapes: T tokens, N heads, D head_dim, F = D/2 frequencies.
"""

from __future__ import annotations

import math

import torch

from metrale_ray.model.decoder_config import RopeConfig


class Rotary:
    """The frequencies of one model on one device."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies_F = rope_frequencies(config, head_dim).to(device)
        self._factor = config.attention_factor
        self._dtype = dtype

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos [T, 1, D] and sin [T, 1, D]; the sine's first half is negated, so `rotate` needs no second sign."""
        angles_TF = positions_T[:, None].float() * self._frequencies_F
        cos_TF, sin_TF = angles_TF.cos() * self._factor, angles_TF.sin() * self._factor
        cos_T1D = torch.cat((cos_TF, cos_TF), dim=-1).to(self._dtype)[:, None]
        sin_T1D = torch.cat((-sin_TF, sin_TF), dim=-1).to(self._dtype)[:, None]
        return cos_T1D, sin_T1D


def rotate(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Every head's vector turned by its token's angles."""
    swapped_TND = x_TND.roll(x_TND.shape[-1] // 2, -1)
    return (x_TND * cos_T1D).add_(swapped_TND.mul_(sin_T1D))


def rope_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position for each pair of dimensions, fp32 [F]."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies_F = 1.0 / config.theta**exponents_F
    match config.kind:
        case "default":
            return frequencies_F
        case "linear":
            return frequencies_F / config.factor
        case "llama3":
            return _llama3(config, frequencies_F)
        case "yarn":
            return _yarn(config, head_dim, exponents_F)


def _llama3(config: RopeConfig, frequencies_F: torch.Tensor) -> torch.Tensor:
    wavelengths_F = 2 * math.pi / frequencies_F
    # The share of the original frequency that is kept: 1 for short waves, 0 for long ones.
    kept_F = (config.original_max_positions / wavelengths_F - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    mixed_F = (1 - kept_F) * frequencies_F / config.factor + kept_F * frequencies_F
    is_long_F = wavelengths_F > config.original_max_positions / config.low_freq_factor
    is_short_F = wavelengths_F < config.original_max_positions / config.high_freq_factor
    return torch.where(is_long_F, frequencies_F / config.factor, torch.where(is_short_F, frequencies_F, mixed_F))


def _yarn(config: RopeConfig, head_dim: int, exponents_F: torch.Tensor) -> torch.Tensor:
    powers_F = config.theta**exponents_F
    low, high = (_yarn_dimension(config, head_dim, rotations) for rotations in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001  # the ramp may be a step, not a division by zero
    ramp_F = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    kept_F = 1 - ramp_F
    return 1.0 / (config.factor * powers_F) * (1 - kept_F) + 1.0 / powers_F * kept_F


def _yarn_dimension(config: RopeConfig, head_dim: int, rotations: float) -> float:
    """The dimension that turns `rotations` times over the original context."""
    turns = config.original_max_positions / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(config.theta))
