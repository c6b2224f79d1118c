# SPDX-License-Identifier: MIT OR Apache-2.0
"""The router: which experts a token goes to, and with which weights.

Softmax over all experts in fp32, then the k largest; ties go to the expert with the lower number, so every rank
chooses alike. Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch

from metrale_ray.model.decoder_config import MoeConfig


def route(scores_TE: torch.Tensor, config: MoeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts [T, K], int64, best first, and their weights [T, K], fp32."""
    probabilities_TE = torch.softmax(scores_TE, dim=-1, dtype=torch.float32)
    sorted_TE, order_TE = torch.sort(probabilities_TE, dim=-1, descending=True, stable=True)
    weights_TK = sorted_TE[:, : config.experts_per_token]
    if config.normalize_weights:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if config.round_weights:
        weights_TK = weights_TK.to(scores_TE.dtype).float()
    return order_TE[:, : config.experts_per_token], weights_TK
