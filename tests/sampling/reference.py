# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sampler once more, dense and obvious: whole vectors, full sorts, sums one after another.

Where two sums of the same numbers in another order could decide differently, it raises Undecided instead of guessing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from metrale_ray.sampling.philox import draw
from metrale_ray.sampling.token_params import TokenParams

INF = math.inf
LARGEST = torch.finfo(torch.float32).max


class Undecided(Exception):
    """A sum meets its bound so closely that sums in floats may fall on either side."""


@dataclass(frozen=True)
class Past:
    """What a row is about, as plain values."""

    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    seed: int = 1
    sequence_index: int = 0
    position: int = 0


def changed_logits(logits_V: torch.Tensor, params: TokenParams, past: Past) -> torch.Tensor:
    """The logits after masks, biases and penalties, fp32 [V]."""
    vocab_size = logits_V.numel()
    masked_V = torch.zeros(vocab_size, dtype=torch.bool)
    if params.allowed_token_ids is not None:
        masked_V[:] = True
        masked_V[list(params.allowed_token_ids)] = False
    for sequence in params.bad_token_ids:
        beginning = sequence[:-1]
        if len(beginning) <= len(past.output) and past.output[len(past.output) - len(beginning) :] == beginning:
            masked_V[sequence[-1]] = True
    if len(past.output) < params.min_tokens:
        for token_id in past.end_token_ids:
            masked_V[token_id] = True
    changed_V = logits_V.masked_fill(masked_V, -INF)
    for token_id, bias in params.logit_bias:
        changed_V[token_id] += bias
    if not params.has_penalties:
        return changed_V
    result_V = changed_V.double()
    for token_id in range(vocab_size):
        count = past.output.count(token_id)
        if count or token_id in past.prompt:
            penalty = params.repetition_penalty
            result_V[token_id] = (
                result_V[token_id] / penalty if result_V[token_id] > 0 else result_V[token_id] * penalty
            )
        result_V[token_id] -= params.frequency_penalty * count
        result_V[token_id] -= params.presence_penalty * (count > 0)
    return torch.where(changed_V == -INF, changed_V, result_V.clamp(-LARGEST, LARGEST).float())


def candidate_weights(logits_V: torch.Tensor, params: TokenParams) -> dict[int, float]:
    """The weight of each token that min_p, top-k and top-p leave, by a full sort; ids ascending."""
    logits = logits_V.tolist()
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    ids_C = torch.tensor(sorted(order))
    values_C = torch.exp((logits_V[ids_C] - logits_V.max()) / params.temperature)
    keep_C = values_C >= torch.tensor(params.min_p, dtype=torch.float32)
    weight = {i: w for i, w, keep in zip(ids_C.tolist(), values_C.tolist(), keep_C.tolist(), strict=True) if keep}
    if params.top_p == 1:
        return weight
    wanted, total, kept = sum(map(Fraction, weight.values())) * Fraction(params.top_p), Fraction(0), []
    for token_id in sorted(weight, key=lambda i: (-weight[i], i)):
        if kept and total >= wanted:
            break
        kept.append(token_id)
        total += Fraction(weight[token_id])
        if abs(total - wanted) <= Fraction(1, 10**12):
            raise Undecided
    return {i: weight[i] for i in sorted(kept)}


def choose(logits: Sequence[float], params: TokenParams, past: Past) -> int | None:
    """The token, or None when none is left. The logits are finite or -inf, and one is finite."""
    changed_V = changed_logits(torch.tensor(logits), params, past)
    changed: list[float] = changed_V.tolist()
    if max(changed) == -INF:
        return None
    if params.is_greedy:
        return changed.index(max(changed))
    weight = candidate_weights(changed_V, params)
    total = sum(map(Fraction, weight.values()))
    target = Fraction(draw(past.seed, past.sequence_index, past.position)) * total
    running = Fraction(0)
    for token_id, value in weight.items():
        running += Fraction(value)
        if abs(running - target) <= Fraction(1, 10**12) * total and running != target:
            raise Undecided
        if running > target:
            return token_id
    raise AssertionError("the draw is below the total")
