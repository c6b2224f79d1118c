# SPDX-License-Identifier: MIT OR Apache-2.0
"""What stands between one row of logits and the draw: temperature, top-k and top-p.

Rules: each works on one row by itself, so a row's result cannot depend on its neighbours. Among equal values the
lower token id comes first, everywhere; so exactly k tokens survive top-k, and top_k=1 is the greedy choice. Nothing
sorts the vocabulary: top-k selects, top-p finds the bucket of weights in which the cut lies and sorts that one alone.

Shapes: V the vocabulary, C the candidates that are left, always in the order of their token ids.
"""

from __future__ import annotations

import torch

# A weight's sign, exponent and three highest bits of its fraction: about a thousand buckets from 0 to 1, each at most
# an eighth wide. For floats of one sign the order of the bits is the order of the values.
_BUCKET_SHIFT = 20
_NUM_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 1  # the bits of 1.0, the largest weight
# Temperatures below the smallest normal fp32 count as 0: logits divided by one are not numbers any more.
MIN_TEMPERATURE = 2.0**-126


def top_k_ids(logits_V: torch.Tensor, top_k: int) -> torch.Tensor:
    """The ids of the `top_k` largest logits, ascending, int64 [C]; `top_k` is from 1 to V."""
    threshold = torch.topk(logits_V, top_k, sorted=False).values.min()
    ids = (logits_V >= threshold).nonzero().flatten()
    surplus = ids.numel() - top_k  # ties with the last one, of which the highest ids go
    if surplus == 0:
        return ids
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[(logits_V[ids] == threshold).nonzero().flatten()[-surplus:]] = False
    return ids[kept]


def weights(logits_C: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights in proportion to the probabilities at `temperature`, fp32 [C]; the largest is exactly 1.

    The logits are fp32 with a finite maximum; -inf has weight 0. Dividing by the sum is left to whoever needs it.
    """
    return (logits_C - logits_C.max()).div_(temperature).exp_()


def top_p_mask(weights_C: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which candidates are in the smallest set of largest weights that holds the share `top_p`, bool [C].

    `top_p` is below 1. At least one candidate is kept. Sums are fp64, of whole buckets from the largest weights down
    and then of single weights.
    """
    bucket_C = weights_C.view(torch.int32) >> _BUCKET_SHIFT
    mass_B = torch.bincount(bucket_C, weights=weights_C.double(), minlength=_NUM_BUCKETS)
    from_top_B = mass_B.flip(0).cumsum(0)
    wanted = float(from_top_B[-1]) * top_p
    num_whole = int(torch.searchsorted(from_top_B, wanted))  # buckets that are needed to the last weight
    cut_bucket = _NUM_BUCKETS - 1 - num_whole
    already = float(from_top_B[num_whole - 1]) if num_whole else 0.0
    mask_C = bucket_C > cut_bucket
    mask_C[_needed((bucket_C == cut_bucket).nonzero().flatten(), weights_C, wanted - already)] = True
    return mask_C


def _needed(ids: torch.Tensor, weights_C: torch.Tensor, wanted: float) -> torch.Tensor:
    """The first of `ids`, by falling weight and then by id, whose weights reach `wanted`; at least one."""
    values, order = weights_C[ids].sort(descending=True, stable=True)
    num_needed = int(torch.searchsorted(values.double().cumsum(0), wanted)) + 1
    return ids[order[:num_needed]]
