# SPDX-License-Identifier: MIT OR Apache-2.0
"""What stands between one row of logits and the draw: temperature, top-k, min_p and top-p.

Rules: each works on one row by itself, so a row's result cannot depend on its neighbours. Among equal values the
lower token id comes first, everywhere; so exactly k tokens survive top-k, and top_k=1 is the greedy choice. Nothing
sorts the vocabulary: top-k finds a bound that k tokens reach and selects among those above it; top-p drops what is
too small to matter, finds the bucket of weights in which the cut lies and sorts that one alone.

NumPy selects, because its compare, count and nonzero are several times as fast as PyTorch's on a CPU, and because it
works in one thread, whose sums do not depend on how many there are. PyTorch's exp is the faster one.

Shapes: V the vocabulary, C the candidates that are left, always in the order of their token ids.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from metrale_ray.sampling.token_params import TokenParams

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Temperatures below the smallest normal fp32 count as 0: logits divided by one are not numbers any more.
MIN_TEMPERATURE = 2.0**-126

# Top-k first takes the maximum of so many logits at a time: enough to make what is left small, and still many maxima.
_TOP_K_DEPTH = 64
# Below it, min_p comes near the smallest fp32 weights, whose rounding is too coarse to choose by the logits.
_MIN_P_BY_LOGITS = 1e-30
_LOWEST = -(2.0**128 - 2.0**104)  # of the finite fp32
# A weight's sign, exponent and three highest bits of its fraction: about a thousand buckets from 0 to 1, each at most
# an eighth wide. For floats of one sign the order of the bits is the order of the values.
_BUCKET_SHIFT = 20
_NUM_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 1  # the bits of 1.0, the largest weight
# Top-p gathers the weights that matter when they are at most this share of all; else looking at all is faster.
_WORTH_GATHERING = 0.25
# Drawing sums so many weights at a time.
_DRAW_BLOCK = 1024


def candidates(logits_V: Floats, peak: float, params: TokenParams) -> tuple[Ids | None, Floats]:
    """The ids that top-k, min_p and top-p leave, int64 [C] (None: all), and their weights, fp32 [C].

    `peak` is the largest logit, which is finite; `params` has a temperature of at least MIN_TEMPERATURE.
    """
    ids_C = _preselected(logits_V, peak, params)
    weights_C = weights(logits_V if ids_C is None else logits_V[ids_C], peak, params.temperature)
    if params.min_p > 0.0:
        ids_C, weights_C = _keep(ids_C, weights_C, np.flatnonzero(weights_C >= np.float32(params.min_p)))
    if params.top_p < 1.0:
        ids_C, weights_C = _keep(ids_C, weights_C, top_p_indices(weights_C, params.top_p))
    return ids_C, weights_C


def top_k_ids(logits_V: Floats, top_k: int) -> Ids:
    """The ids of the `top_k` largest logits, ascending, int64 [C]; `top_k` is from 1 to V."""
    ids = np.flatnonzero(logits_V >= _top_k_bound(logits_V, top_k))
    surplus = ids.size - top_k
    if surplus == 0:
        return ids
    values = logits_V[ids]
    threshold = np.partition(values, surplus)[surplus]
    keep = values > threshold
    ties = np.flatnonzero(values == threshold)
    keep[ties[: top_k - np.count_nonzero(keep)]] = True  # of the ties with the last one the lowest ids stay
    kept: Ids = ids[keep]
    return kept


def weights(logits_C: Floats, peak: float, temperature: float) -> Floats:
    """Weights in proportion to the probabilities at `temperature`, fp32 [C]; that of a logit of `peak` is exactly 1.

    -inf has weight 0. Dividing by the sum is left to whoever needs it.
    """
    scaled_C = torch.from_numpy(logits_C).sub(peak)
    if temperature != 1.0:
        scaled_C.div_(temperature)
    weights_C: Floats = scaled_C.exp_().numpy()
    return weights_C


def top_p_indices(weights_C: Floats, top_p: float) -> Ids:
    """Which candidates are in the smallest set of largest weights that holds the share `top_p`, ascending.

    `top_p` is below 1. At least one candidate is kept. Sums are fp64, of whole buckets from the largest weights down
    and then of single weights.
    """
    total = float(weights_C.sum(dtype=np.float64))
    # All weights below this bound together are less than what may be dropped, so each of them is dropped.
    bound = np.float32(0.99 * (1.0 - top_p) * total / weights_C.size)
    matter_C = weights_C >= bound
    if np.count_nonzero(matter_C) > _WORTH_GATHERING * weights_C.size:
        return np.flatnonzero(_top_p_mask(weights_C, total * top_p))
    indices = np.flatnonzero(matter_C)
    return indices[_top_p_mask(weights_C[indices], total * top_p)]


def draw_index(weights_C: Floats, uniform: float) -> int:
    """The index of the candidate on which `uniform`, in [0, 1), falls when the weights are laid end to end.

    Sums are fp64: of blocks of 1024 candidates first, and one after another inside the block that is met. A weight of
    0 is never met. At least one weight is above 0.
    """
    ends = _block_sums(weights_C).cumsum()
    target = uniform * float(ends[-1])  # below the total, as `uniform` is below 1
    block = int(ends.searchsorted(target, side="right"))
    start = block * _DRAW_BLOCK
    inner = weights_C[start : start + _DRAW_BLOCK]
    before = float(ends[block - 1]) if block else 0.0
    index = int(inner.cumsum(dtype=np.float64).searchsorted(target - before, side="right"))
    if index == inner.size:  # the two sums of the block differ in their last bit, and the draw fell between them
        index = int(np.flatnonzero(inner)[-1])
    return start + index


def _preselected(logits_V: Floats, peak: float, params: TokenParams) -> Ids | None:
    """The candidates as far as they can be told from the logits, which saves the others' weights."""
    if 0 < params.top_k < logits_V.size:
        return top_k_ids(logits_V, params.top_k)
    if params.min_p >= _MIN_P_BY_LOGITS:
        # A little lower than it must be: the weights decide, and their rounding is not that of this line.
        bound = peak + params.temperature * (1.0001 * math.log(params.min_p) - 0.0001)
        return np.flatnonzero(logits_V >= np.float32(max(bound, _LOWEST)))
    return None


def _keep(ids_C: Ids | None, weights_C: Floats, indices: Ids) -> tuple[Ids, Floats]:
    return (indices if ids_C is None else ids_C[indices]), weights_C[indices]


def _top_k_bound(logits_V: Floats, top_k: int) -> np.float32:
    """A value that at least `top_k` logits reach, and usually not many more."""
    width = logits_V.size // _TOP_K_DEPTH
    if 2 * top_k > width:
        return _kth_largest(logits_V, top_k)
    # The k-th largest of the maxima of disjoint sets: each of k sets has a logit that reaches it.
    maxima = logits_V[: width * _TOP_K_DEPTH].reshape(_TOP_K_DEPTH, width).max(axis=0)
    return _kth_largest(maxima, top_k)


def _kth_largest(values: Floats, k: int) -> np.float32:
    found: np.float32 = np.partition(values, values.size - k)[values.size - k]
    return found


def _top_p_mask(weights_C: Floats, wanted: float) -> NDArray[np.bool_]:
    bucket_C = weights_C.view(np.int32) >> _BUCKET_SHIFT
    mass_B = np.bincount(bucket_C, weights=weights_C, minlength=_NUM_BUCKETS)
    from_top_B = mass_B[::-1].cumsum()
    num_whole = min(int(from_top_B.searchsorted(wanted)), _NUM_BUCKETS - 1)  # buckets needed to the last weight
    cut_bucket = _NUM_BUCKETS - 1 - num_whole
    already = float(from_top_B[num_whole - 1]) if num_whole else 0.0
    mask_C = bucket_C > cut_bucket
    mask_C[_needed(np.flatnonzero(bucket_C == cut_bucket), weights_C, wanted - already)] = True
    return mask_C


def _needed(indices: Ids, weights_C: Floats, wanted: float) -> Ids:
    """The first of `indices`, by falling weight and then by id, whose weights reach `wanted`; at least one."""
    values = weights_C[indices]
    order = np.argsort(-values, kind="stable")
    num_needed = int(values[order].cumsum(dtype=np.float64).searchsorted(wanted)) + 1
    return indices[order[:num_needed]]


def _block_sums(weights_C: Floats) -> NDArray[np.float64]:
    whole = weights_C.size // _DRAW_BLOCK * _DRAW_BLOCK
    sums = weights_C[:whole].reshape(-1, _DRAW_BLOCK).sum(axis=1, dtype=np.float64)
    return np.append(sums, weights_C[whole:].sum(dtype=np.float64))
