# SPDX-License-Identifier: MIT OR Apache-2.0
"""A sparse layer's mlp: router, placement, local experts, combine.

Every rank routes every token from its own copy of the hidden state, adds its own experts' share into the collectives'
payload, and gets the sum over all ranks. One reduction per layer, also on a rank without experts or tokens for them.
The residual is the caller's, added once after the reduction. Shapes: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from metrale_ray.model.collectives import Collectives
from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.experts.local import LocalExperts
from metrale_ray.model.experts.router import route
from metrale_ray.model.layers.linear import Product

OnRouting = Callable[[torch.Tensor, torch.Tensor], None]
"""Is told of the experts chosen [T, K] and their weights [T, K] of one layer."""


def _nobody_watches(chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
    """Most steps."""


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
        self._on_routing: OnRouting = _nobody_watches

    @contextmanager
    def watched(self, on_routing: OnRouting) -> Iterator[None]:
        """While in it, `on_routing` is told of each routing."""
        self._on_routing = on_routing
        try:
            yield
        finally:
            self._on_routing = _nobody_watches

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The mlp's output [T, H] without the residual, valid until the next reduction. Raises PeerFailed, LinkLost."""
        chosen_TK, weights_TK = route(self._product(x_TH, self._router_EH, None), self._config)
        self._on_routing(chosen_TK, weights_TK)
        self._experts.add_to(self._collectives.payload(), x_TH, chosen_TK, weights_TK)
        return self._collectives.all_reduce()
