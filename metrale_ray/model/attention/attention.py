# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Attention`: what the decoder asks of a way to attend over the paged cache.

Rules. A plan is made once for a step and a window, and serves all layers with that window. Its spans come in
`attention_order`, and the rows of queries, keys and values follow them. Shapes: T rows, N query heads, M kv heads,
D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.protocol.commands import Span

Plan = TypeVar("Plan")


class Attention(ABC, Generic[Plan]):
    """Writes a step's keys and values into one rank's cache, then attends."""

    @abstractmethod
    def plan(self, spans: Sequence[Span], seqs: Sequence[SequenceState], window: int | None) -> Plan:
        """What a step needs to know, from its spans and the sequences that they belong to."""

    @abstractmethod
    def __call__(
        self, layer: int, q_TND: torch.Tensor, k_TMD: torch.Tensor, v_TMD: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        """The attention output [T, N, D] of one layer."""
