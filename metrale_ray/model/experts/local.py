# SPDX-License-Identifier: MIT OR Apache-2.0
"""What this rank's experts add to each token: the plain form, and the one that is used.

Rules. `chosen` holds global numbers; only experts in `mine` are computed, absent ones cost nothing and add zero. A
token's sum is over its choices in order, whatever else is in the step.

Shapes: T tokens, H hidden, K experts per token, E experts, I intermediate, L local experts, P = T·K (token, expert)
pairs, S the local ones of them, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch

from metrale_ray.model.kernels.kernels import LocalExperts
from metrale_ray.model.layers.activation import Activation
from metrale_ray.model.layers.linear import Product, Weight


def plain_experts(
    x_TH: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    mine: range,
    gate_up_L2IH: torch.Tensor,
    down_LHI: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """The reference: one token, one choice at a time. fp32 [T, H]."""
    out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for token in range(x_TH.shape[0]):
        for expert, weight in zip(chosen_TK[token].tolist(), weights_TK[token], strict=True):
            if expert in mine:
                gate, up = (gate_up_L2IH[expert - mine.start] @ x_TH[token]).chunk(2)
                out_TH[token] += weight * (down_LHI[expert - mine.start] @ (activation(gate) * up)).float()
    return out_TH


class TorchExperts(LocalExperts, Generic[Weight]):
    """This rank's experts of one layer, as one product per expert that has tokens."""

    def __init__(
        self,
        mine: range,
        gate_up_L2IH: Weight,
        down_LHI: Weight,
        activation: Activation,
        product: Product[Weight],
        num_experts: int,
    ) -> None:
        self._mine = mine
        self.num_tokens_E = torch.zeros(num_experts, dtype=torch.int64, device="cpu")  # chosen so far, of all ranks
        self._gate_up: Sequence[Weight] = gate_up_L2IH.unbind()
        self._down: Sequence[Weight] = down_LHI.unbind()
        self._activation = activation
        self._product: Product[Weight] = product

    def write(
        self, out_TH: torch.Tensor, x_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> None:
        """See LocalExperts."""
        num_choices = chosen_TK.shape[1]
        pairs_S, counts = self._local_pairs(chosen_TK.reshape(-1))
        if not counts:
            out_TH.zero_()
            return
        y_SH = self._compute(x_TH.index_select(0, pairs_S // num_choices), counts).float()
        y_SH.mul_(weights_TK.reshape(-1).index_select(0, pairs_S)[:, None])
        # Back in the order of the choices, so that the sum does not depend on how the pairs were sorted.
        make = torch.empty if pairs_S.numel() == chosen_TK.numel() else torch.zeros
        by_choice = make(chosen_TK.numel(), x_TH.shape[1], device=x_TH.device, dtype=torch.float32)
        by_choice.index_copy_(0, pairs_S, y_SH)
        out_TH.copy_(by_choice.view(*chosen_TK.shape, -1).sum(dim=1))

    def _local_pairs(self, experts_P: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """The pairs of local experts, sorted by expert, and (local expert, number of its pairs) where there are any."""
        order_P = torch.argsort(experts_P, stable=True)
        counts_E = torch.bincount(experts_P, minlength=len(self.num_tokens_E)).cpu()  # whose sizes the products need
        self.num_tokens_E += counts_E
        counts = counts_E.tolist()
        first = sum(counts[: self._mine.start])
        local = [(number, n) for number, n in enumerate(counts[self._mine.start : self._mine.stop]) if n]
        return order_P[first : first + sum(n for _, n in local)], local

    def _compute(self, x_SH: torch.Tensor, counts: list[tuple[int, int]]) -> torch.Tensor:
        sizes = [n for _, n in counts]
        inner = [self._up(x, local) for x, (local, _) in zip(torch.split(x_SH, sizes), counts, strict=True)]
        gate_SI, up_SI = torch.cat(inner).chunk(2, dim=-1)
        inner_SI = self._activation(gate_SI) * up_SI
        return torch.cat(
            [self._down_of(h, local) for h, (local, _) in zip(torch.split(inner_SI, sizes), counts, strict=True)]
        )

    def _up(self, x_NH: torch.Tensor, local: int) -> torch.Tensor:
        return self._product(x_NH, self._gate_up[local], None)

    def _down_of(self, h_NI: torch.Tensor, local: int) -> torch.Tensor:
        return self._product(h_NI, self._down[local], None)
