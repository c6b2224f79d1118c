# SPDX-License-Identifier: MIT OR Apache-2.0
"""`sample`: from a step's logits to one token id per row. Rank 0 calls it; no other rank chooses anything.

Rules: a row's token depends on its logits and its SampleRow alone, to the last bit, whatever else is in the batch:
greedy rows share one argmax, and every other row goes through its own few operations on the CPU. A row whose logits
hold NaN or +inf, or nothing finite, gives a SampleError; the rows beside it are not touched. -inf is a token that
cannot be chosen.

How a token is drawn: the candidates that top-k and top-p leave stand in the order of their ids, their weights are
summed one after another in fp64, and the first whose running sum passes `draw(...)` times the total is taken.

Shapes: R rows of the step, V the vocabulary, C the candidates of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.philox import draw
from metrale_ray.sampling.processors import MIN_TEMPERATURE, top_k_ids, top_p_mask, weights


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose token a row of logits is for.

    `seed` is the request's, or the engine's choice for it (u64); `sequence_index` tells apart the sequences of one
    request; `position` is the place of the new token in its sequence, the prompt included.
    """

    params: SamplingParams
    seed: int
    sequence_index: int
    position: int


@dataclass(frozen=True, slots=True)
class SampleError:
    """Why a row has no token. `code` is stable; the message, which is its text, is for people."""

    code: str
    message: str

    def __str__(self) -> str:
        return self.message


def sample(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | SampleError]:
    """One token id or error per row of `logits_RV`, which is fp32 on any device and is not changed.

    Raises ValueError when the shape or the dtype is not what `rows` need.
    """
    _check(logits_RV, rows)
    if not rows:
        return []
    best_R = logits_RV.argmax(dim=1)  # the first on a tie; a NaN counts as the largest
    peaks = logits_RV.gather(1, best_R[:, None]).flatten().isfinite().tolist()
    results: list[int | SampleError] = list(best_R.tolist())
    drawn = [r for r, row in enumerate(rows) if peaks[r] and row.params.temperature >= MIN_TEMPERATURE]
    if drawn:
        index = torch.tensor(drawn, device=logits_RV.device)
        for r, logits_V in zip(drawn, logits_RV.index_select(0, index).cpu(), strict=True):
            results[r] = _draw_token(logits_V, rows[r])
    for r, is_finite in enumerate(peaks):
        if not is_finite:
            results[r] = SampleError("bad_logits", f"the logits of position {rows[r].position} are not finite numbers")
    return results


def _draw_token(logits_V: torch.Tensor, row: SampleRow) -> int:
    params = row.params
    if not 0 < params.top_k < logits_V.numel():
        return _draw_index(logits_V, row)
    ids_C = top_k_ids(logits_V, params.top_k)
    return int(ids_C[_draw_index(logits_V[ids_C], row)])


def _draw_index(logits_C: torch.Tensor, row: SampleRow) -> int:
    weights_C = weights(logits_C, row.params.temperature)
    if row.params.top_p < 1.0:
        weights_C *= top_p_mask(weights_C, row.params.top_p)
    sums_C = weights_C.cumsum(0, dtype=torch.float64)
    target = draw(row.seed, row.sequence_index, row.position) * float(sums_C[-1])  # below the total, as draw is below 1
    return int(torch.searchsorted(sums_C, target, right=True))


def _check(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    if logits_RV.dim() != 2 or logits_RV.shape[0] != len(rows) or logits_RV.shape[1] == 0:
        raise ValueError(f"logits have the shape {tuple(logits_RV.shape)}; {len(rows)} rows of a vocabulary are needed")
    if logits_RV.dtype != torch.float32:
        raise ValueError(f"logits are {logits_RV.dtype}; they must be torch.float32")
