# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention over the paged cache by way of a flash kernel, which reads the blocks where they lie.

Single tokens and longer spans run in one call per layer and nothing is gathered. A span's queries are the last tokens
of its keys, so the causal mask is aligned to the end. Shapes: T rows, N query heads, M kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from metrale_ray.model.attention.attention import Attention, split_heads
from metrale_ray.model.attention.flash_adapter import FlashKernel
from metrale_ray.model.attention.flash_plan import FlashPlan, plan_flash
from metrale_ray.model.attention.plan import attention_order
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.protocol.commands import Span


class FlashAttention(Attention[FlashPlan]):
    """Writes a step's keys and values into the cache, then lets `kernel` attend."""

    def __init__(self, cache: KvCache, kernel: FlashKernel) -> None:
        self._cache = cache
        self._kernel = kernel

    def order(self, spans: Sequence[Span], windows: Collection[int | None]) -> list[int]:
        """Single tokens by length, then longer spans."""
        return attention_order(spans, None if None in windows else max(window for window in windows if window))

    def plan(self, spans: Sequence[Span], seqs: Sequence[SequenceState], window: int | None) -> FlashPlan:
        """Block tables, lengths and starts of the spans."""
        return plan_flash(spans, seqs, self._cache, window, self._cache.layers[0].device)

    def __call__(self, layer: int, qkv_TXD: torch.Tensor, plan: FlashPlan) -> torch.Tensor:
        """The attention output [T, N, D] of one layer."""
        q_TND, k_TMD, v_TMD = split_heads(qkv_TXD, self._cache.num_kv_heads)
        self._cache.write(layer, plan.places, k_TMD, v_TMD)
        keys, values = self._cache.blocks(layer)
        return self._kernel.attend(q_TND, keys, values, plan).contiguous()
