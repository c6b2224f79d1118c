# SPDX-License-Identifier: MIT OR Apache-2.0
"""A sparse layer's mlp: router, placement, local experts, combine.

Every rank routes every token from its own copy of the hidden state, writes its own experts' share into the collectives'
payload, and gets the sum over all ranks. One reduction per layer, also on a rank without experts or tokens for them.
The residual is the caller's, added once after the reduction. Shapes: T tokens, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from metrale_ray.model.collectives import Collectives
from metrale_ray.model.kernels.kernels import GatedMlp, LocalExperts, Router

OnRouting = Callable[[torch.Tensor, torch.Tensor], None]
"""Is told of the experts chosen [T, K] and their weights [T, K] of one layer."""


def _nobody_watches(chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
    """Most steps."""


class SparseMlp(GatedMlp):
    """Experts spread over the ranks of `collectives`."""

    def __init__(self, router: Router, experts: LocalExperts, collectives: Collectives) -> None:
        self._router = router
        self._experts = experts
        self.num_tokens_E = experts.num_tokens_E  # the very tensor that the experts add to
        self._collectives = collectives
        self._on_routing: OnRouting = _nobody_watches

    @contextmanager
    def watched(self, on_routing: OnRouting) -> Iterator[None]:
        """While in it, `on_routing` is told of each routing."""
        self._on_routing = on_routing
        try:
            yield
        finally:
            self._on_routing = _nobody_watches

    def __call__(self, x_TH: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """See GatedMlp. Raises PeerFailed, LinkLost."""
        chosen_TK, weights_TK = self._router(x_TH)
        self._on_routing(chosen_TK, weights_TK)
        self._experts.write(self._collectives.payload(), x_TH, chosen_TK, weights_TK)
        return add_to.add_(self._collectives.all_reduce())
