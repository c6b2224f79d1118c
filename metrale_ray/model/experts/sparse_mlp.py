# SPDX-License-Identifier: MIT OR Apache-2.0
"""A sparse layer's mlp: router, placement, local experts, combine.

Every rank routes every token from its own copy of the hidden state, adds its own experts' share into the collectives'
payload, and gets the sum over all ranks. One reduction per layer, also on a rank without experts or tokens for them.
The residual is the caller's, added once after the reduction. Shapes: T tokens, H hidden, E experts.
"""

from __future__ import annotations

import torch

from metrale_ray.model.collectives import Collectives
from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.experts.local import LocalExperts
from metrale_ray.model.experts.router import route
from metrale_ray.model.layers.linear import Product


class SparseMlp:
    """Experts spread over the ranks of `collectives`."""

    def __init__(
        self,
        config: MoeConfig,
        router_EH: torch.Tensor,
        experts: LocalExperts,
        collectives: Collectives,
        product: Product,
    ) -> None:
        self._config = config
        self._router_EH = router_EH
        self._experts = experts
        self.num_tokens_E = experts.num_tokens_E  # the very tensor that the experts add to
        self._collectives = collectives
        self._product = product

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The mlp's output [T, H] without the residual, valid until the next reduction. Raises PeerFailed, LinkLost."""
        chosen_TK, weights_TK = route(self._product(x_TH, self._router_EH, None), self._config)
        self._experts.add_to(self._collectives.payload(), x_TH, chosen_TK, weights_TK)
        return self._collectives.all_reduce()
