# SPDX-License-Identifier: MIT OR Apache-2.0
"""The plain form of attention: one row and one head at a time, from block tables alone. The reference for the fast one.

Shapes: T rows, N query heads, D head_dim, S seen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.protocol.commands import Span


def plain_attention(
    layer: int,
    q_TND: torch.Tensor,
    cache: KvCache,
    spans: Sequence[Span],
    seqs: Sequence[SequenceState],
    window: int | None,
) -> torch.Tensor:
    """The attention output [T, N, D], fp32, rows in the order of `spans`; their keys and values are cached already."""
    out_TND = torch.empty(q_TND.shape, dtype=torch.float32)
    row = 0
    for span, seq in zip(spans, seqs, strict=True):
        for position in range(span.start, span.end):
            first = 0 if window is None else max(0, position - window + 1)
            places = [_place(seq, seen, cache.block_size) for seen in range(first, position + 1)]
            out_TND[row] = _one_row(q_TND[row].float(), cache.gather(layer, torch.tensor(places)).float())
            row += 1
    return out_TND


def _place(seq: SequenceState, position: int, block_size: int) -> int:
    return seq.block_table[position // block_size] * block_size + position % block_size


def _one_row(q_ND: torch.Tensor, kv_S2MD: torch.Tensor) -> torch.Tensor:
    group_size = q_ND.shape[0] // kv_S2MD.shape[2]
    heads = []
    for head, q_D in enumerate(q_ND):
        keys_SD, values_SD = kv_S2MD[:, :, head // group_size].unbind(1)
        scores_S = keys_SD @ q_D / q_D.shape[0] ** 0.5
        heads.append(scores_S.softmax(0) @ values_SD)
    return torch.stack(heads)
