# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Family`: what one architecture does differently: how its config.json reads and how its checkpoints name things.

Names are relative to `model.layers.N.`; E stands for an expert's number. The layout of a checkpoint's experts follows
from names alone, never from shapes: a fused tensor [experts, 2·intermediate, hidden] and its transpose can look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metrale_ray.model.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class ExpertsApart:
    """Every expert has tensors of its own: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class ExpertsFused:
    """All experts of a layer in two tensors: gate_up [experts, 2·intermediate, hidden] (the gate's rows first) and
    down [experts, hidden, intermediate]."""

    router: str
    gate_up: str
    down: str


ExpertsLayout = ExpertsApart | ExpertsFused


@dataclass(frozen=True, slots=True)
class Family:
    """`read_config` raises CheckpointError for what it cannot honour. A checkpoint with experts follows one of
    `layouts`; a family without experts has none."""

    read_config: Callable[[Mapping[str, Any]], DecoderConfig]
    layouts: tuple[ExpertsLayout, ...] = ()
