# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention over the paged cache by way of `scaled_dot_product_attention`.

Keys and values are gathered by place; a kv head's group of query heads is folded into the rows of one product, which
reads each key once. Shapes: T rows, B rows of a group, Q tokens of a span, L places, N query heads, M kv heads,
G = N/M, D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.nn import functional

from metrale_ray.model.attention.attention import Attention, split_heads
from metrale_ray.model.attention.plan import (
    AttentionPlan,
    DecodeGroup,
    PrefillSpan,
    attention_order,
    plan_attention,
)
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.protocol.commands import Span


class SdpaAttention(Attention[AttentionPlan]):
    """Writes a step's keys and values into the cache, then attends."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def order(self, spans: Sequence[Span], windows: Collection[int | None]) -> list[int]:
        """Single tokens by group, then longer spans. What the widest window groups, narrower ones group too."""
        return attention_order(spans, None if None in windows else max(window for window in windows if window))

    def plan(self, spans: Sequence[Span], seqs: Sequence[SequenceState], window: int | None) -> AttentionPlan:
        """Groups of single tokens and longer spans, with the places that each attends to."""
        layer_P2MD = self._cache.layers[0]
        return plan_attention(spans, seqs, self._cache, window, layer_P2MD.dtype, layer_P2MD.device)

    def __call__(self, layer: int, qkv_TXD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """The attention output [T, N, D] of one layer."""
        q_TND, k_TMD, v_TMD = split_heads(qkv_TXD, self._cache.num_kv_heads)
        self._cache.write(layer, plan.places, k_TMD, v_TMD)
        parts = [self._decode(layer, q_TND[group.rows], group) for group in plan.groups]
        parts += [self._prefill(layer, q_TND[span.rows], span) for span in plan.spans]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def _decode(self, layer: int, q_BND: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        kv_BL2MD = self._cache.gather(layer, group.places)
        keys_BMLD, values_BMLD = kv_BL2MD.permute(2, 0, 3, 1, 4)
        q_BMGD = q_BND.reshape(q_BND.shape[0], keys_BMLD.shape[1], -1, q_BND.shape[-1])
        out_BMGD = functional.scaled_dot_product_attention(q_BMGD, keys_BMLD, values_BMLD, attn_mask=group.mask)
        return out_BMGD.reshape(q_BND.shape)

    def _prefill(self, layer: int, q_QND: torch.Tensor, span: PrefillSpan) -> torch.Tensor:
        kv_L2MD = self._cache.gather(layer, span.places)
        keys_MLD, values_MLD = kv_L2MD.permute(1, 2, 0, 3)
        num_kv_heads = keys_MLD.shape[0]
        group_size = q_QND.shape[1] // num_kv_heads
        q_MGQD = q_QND.transpose(0, 1).reshape(num_kv_heads, group_size, -1, q_QND.shape[-1])
        out_MGQD = functional.scaled_dot_product_attention(
            q_MGQD,
            keys_MLD[:, None].expand(-1, group_size, -1, -1),
            values_MLD[:, None].expand(-1, group_size, -1, -1),
            attn_mask=span.mask,
            is_causal=span.mask is None,
        )
        return out_MGQD.flatten(0, 1).transpose(0, 1)
