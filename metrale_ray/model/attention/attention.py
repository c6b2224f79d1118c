# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Attention`: what the decoder asks of a way to attend over the paged cache.

Rules. A plan is made once for a step and a window, and serves all layers with that window. Its spans come in
`order`, and the rows of queries, keys and values follow them. Shapes: T rows, N query heads, M kv heads, X = N + 2·M,
D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

import torch

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.protocol.commands import Span

Plan = TypeVar("Plan")


class Attention(ABC, Generic[Plan]):
    """Writes a step's keys and values into one rank's cache, then attends."""

    @abstractmethod
    def order(self, spans: Sequence[Span], windows: Collection[int | None]) -> list[int]:
        """The order in which a step packs its spans, by their numbers."""

    @abstractmethod
    def plan(self, spans: Sequence[Span], seqs: Sequence[SequenceState], window: int | None) -> Plan:
        """What a step needs to know, from its spans and the sequences that they belong to."""

    @abstractmethod
    def __call__(self, layer: int, qkv_TXD: torch.Tensor, plan: Plan) -> torch.Tensor:
        """The attention output [T, N, D] of one layer, without gaps. Rows hold queries, keys and values."""


def split_heads(qkv_TXD: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the queries [T, N, D], keys [T, M, D] and values [T, M, D]."""
    num_heads = qkv_TXD.shape[1] - 2 * num_kv_heads
    num_rotated = num_heads + num_kv_heads
    return qkv_TXD[:, :num_heads], qkv_TXD[:, num_heads:num_rotated], qkv_TXD[:, num_rotated:]
