# SPDX-License-Identifier: MIT OR Apache-2.0
"""`StepWatch`: what one step computed for the last token of each span, kept to be compared between the ranks.

Rules. What is kept is a few rows, on the device; bytes come to the host only when the step has succeeded. The routing
is kept beside the residual because a rank whose router differs spoils the sum that all ranks get: their hidden states
stay equal, and wrong. Shapes: T rows, H hidden, L layers with experts, K experts per token, R spans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from metrale_ray.protocol.limits import DIGEST_BYTES


class StepWatch:
    """`rows` are the packed rows to keep, in the order of the spans."""

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self._rows_R = torch.tensor(rows, dtype=torch.int64, device=device)
        self._residual_RH: torch.Tensor | None = None
        self._is_in_order = True  # the rows of the routing are those of the spans, and not yet the packed ones
        self._chosen_LRK: list[torch.Tensor] = []
        self._weights_LRK: list[torch.Tensor] = []

    def note_routing(self, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        """What the router of one layer chose, called in the order of the layers."""
        self._is_in_order = len(chosen_TK) != len(self._rows_R)
        if self._is_in_order:
            chosen_TK, weights_TK = (t.index_select(0, self._rows_R) for t in (chosen_TK, weights_TK))
        self._chosen_LRK.append(chosen_TK)
        self._weights_LRK.append(weights_TK)

    def note_residual(self, x_TH: torch.Tensor) -> None:
        """The hidden states after the last layer."""
        self._residual_RH = x_TH.index_select(0, self._rows_R)

    def witness(self) -> dict[str, bytes]:
        """8 bytes of each of what was kept."""
        witness = {}
        if self._residual_RH is not None:
            witness["residual"] = hash_tensors([self._residual_RH])
        if self._chosen_LRK:
            routing = [torch.stack(self._chosen_LRK).to(torch.int32), torch.stack(self._weights_LRK)]
            if not self._is_in_order:
                routing = [kept_LRK.index_select(1, self._rows_R) for kept_LRK in routing]
            witness["routing"] = hash_tensors(routing)
        return witness


def hash_tensors(tensors: Sequence[torch.Tensor]) -> bytes:
    """8 bytes of the tensors' own bytes, one after another."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
