# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layers of which each rank computes a part: what the parts give is summed over the ranks, and logits are gathered.

Rules. A rank that holds nothing of a layer adds zeros and takes part all the same. What is added to, the residual, is
the same on every rank and is added once, after the sum. Each raises PeerFailed and LinkLost, as its collective does.

Shapes: T tokens, H hidden, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch

from metrale_ray.model.collectives import Collectives
from metrale_ray.model.kernels.kernels import Embedding, GatedMlp, Linear
from metrale_ray.model.layers.self_attention import SelfAttention
from metrale_ray.model.step import Step


class SummedAttention:
    """A rank's heads; `attention` is None where it has none."""

    def __init__(self, attention: SelfAttention | None, collectives: Collectives) -> None:
        self._attention = attention
        self._collectives = collectives

    def __call__(self, x_TH: torch.Tensor, step: Step, add_to: torch.Tensor) -> torch.Tensor:
        """See SelfAttention."""
        share_TH = self._collectives.payload()
        if self._attention is not None:
            self._attention(x_TH, step, share_TH)
        return add_to.add_(self._collectives.all_reduce())


class SummedMlp(GatedMlp):
    """A rank's part of the inner dimension; `mlp` is None where it has none."""

    def __init__(self, mlp: GatedMlp | None, collectives: Collectives) -> None:
        self._mlp = mlp
        self._collectives = collectives

    def __call__(self, x_TH: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """See GatedMlp."""
        share_TH = self._collectives.payload()
        if self._mlp is not None:
            self._mlp(x_TH, share_TH)
        return add_to.add_(self._collectives.all_reduce())


class SummedEmbedding:
    """A rank's rows of the vocabulary; `embed` is None where it has none. Each token's row is on one rank."""

    def __init__(self, embed: Embedding | None, rows: range, collectives: Collectives) -> None:
        self._embed = embed
        self._rows = rows
        self._collectives = collectives

    def __call__(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows [T, H], memory of their own."""
        share_TH = self._collectives.payload()
        here_R = ((token_ids_T >= self._rows.start) & (token_ids_T < self._rows.stop)).nonzero().view(-1)
        if self._embed is not None and here_R.numel():
            share_TH.index_copy_(0, here_R, self._embed(token_ids_T[here_R] - self._rows.start))
        return self._collectives.all_reduce().clone()


class GatheredHead:
    """A rank's rows of the output head; `head` is None where it has none."""

    def __init__(self, head: Linear | None, collectives: Collectives) -> None:
        self._head = head
        self._collectives = collectives

    def __call__(self, x_RH: torch.Tensor) -> torch.Tensor | None:
        """Logits [R, V], fp32, on rank 0, None elsewhere; at least one row. Valid until the next step."""
        part_RW = x_RH.new_empty((len(x_RH), 0)) if self._head is None else self._head(x_RH)
        return self._collectives.gather(part_RW)
