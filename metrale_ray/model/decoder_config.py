# SPDX-License-Identifier: MIT OR Apache-2.0
"""`DecoderConfig`: what a decoder is, whatever its family and however its config.json was written.

Rules: everything that changes the output is here, in one spelling; a family's file reads config.json into it and
refuses what it cannot honour. Leaves out: weights, names of tensors, dtypes and devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields past `factor` matter only for the kinds that name them in layers/rotary.py."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """One sparse layer. `normalize_weights`: the chosen experts' weights are scaled to a sum of 1.

    `round_weights`: the weights are rounded to the model's dtype before they are used.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    round_weights: bool


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer. `sparse_layers` says for each layer whether its mlp is a mixture of experts.

    `intermediate_size` is that of dense layers, and so is `mlp_bias`; `sliding_window` counts the tokens that a token
    attends to, itself included, in the layers where `windowed_layers` is true; `qk_norm`: queries and keys are
    normalised per head before the rotation. `moe` is None when no layer has experts.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    activation: str
    max_positions: int
    rope: RopeConfig
    sliding_window: int | None
    windowed_layers: tuple[bool, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    moe: MoeConfig | None
    sparse_layers: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        """All layers, dense and sparse."""
        return len(self.sparse_layers)

    @property
    def num_sparse_layers(self) -> int:
        """Layers with experts: one reduction each."""
        return sum(self.sparse_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer, None where a layer attends to everything before."""
        return tuple(self.sliding_window if windowed else None for windowed in self.windowed_layers)
