# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fewest bytes that a decode step of the benchmarks' checkpoint reads, and so the least time it can take.

A step reads, layer after layer, attention's weights, the router, the experts that any of its tokens chose, and the
cached keys and values; and last the output head. With E experts, k per token and b tokens that choose at random,
E·(1 - (1 - k/E)^b) distinct experts are read in each layer. Over ranks, a layer takes as long as the rank with the most
of them: its number is the mean of the largest of R shares, by drawing.

    bytes(R, b, c) = L·(A/a + G + X(R, b)·x + b·c·K/a) + H/h      time >= bytes / (bandwidth of one rank's cores)

L layers; A attention's weights, G the router, x an expert, K cached keys and values of a token in a layer, H the head;
X experts on the slowest rank, c tokens of context. a is R where attention is split over the ranks, else 1; h is a: the
head is split with it, else rank 0 reads it whole.
Left out: norms, activations, embedding rows, and whatever stays in a cache from one step to the next.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from bench.model import SIZES

BF16_BYTES = 2
SCALE_BYTES = 4  # of each output of an int8 matrix
LEAST_DRAWS, DRAWN_TOKENS = 200, 4000  # of a batch; large batches differ little from draw to draw


@dataclass(frozen=True)
class Layout:
    """How a model lies: ranks, whether attention and head are split over them, bytes of a weight (router and head stay
    in bf16)."""

    ranks: int = 1
    is_split: bool = False
    is_int8: bool = False

    @property
    def parts(self) -> int:
        """Into which attention, cache and head are split."""
        return self.ranks if self.is_split else 1


def step_bytes(layout: Layout, batch: int, context: float, distinct: float | None = None) -> float:
    """Bytes that the slowest rank reads in one decode step of `batch` sequences of `context` tokens.

    `distinct`: experts read in a layer by all ranks together, where that was measured.
    """
    hidden, layers = SIZES["hidden_size"], SIZES["num_hidden_layers"]
    heads, kv_heads, head_dim = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["head_dim"]
    queries = -(-heads // layout.parts) * head_dim
    keys = -(-kv_heads // layout.parts) * head_dim
    attention = _matrix(layout, queries + 2 * keys, hidden) + _matrix(layout, hidden, queries)
    router = BF16_BYTES * SIZES["num_experts"] * hidden
    experts = slowest_experts(layout.ranks, batch, distinct) * expert_bytes(layout)
    cache = BF16_BYTES * 2 * keys * context * batch
    head = BF16_BYTES * hidden * -(-SIZES["vocab_size"] // layout.parts)
    return layers * (attention + router + experts + cache) + head


def expert_bytes(layout: Layout) -> float:
    """Bytes of one expert."""
    hidden, inner = SIZES["hidden_size"], SIZES["moe_intermediate_size"]
    return _matrix(layout, 2 * inner, hidden) + _matrix(layout, hidden, inner)


def distinct_experts(batch: int) -> float:
    """How many experts of a layer a batch reads, when each token chooses at random."""
    experts, chosen = SIZES["num_experts"], SIZES["num_experts_per_tok"]
    return experts * (1 - (1 - chosen / experts) ** batch)


def slowest_experts(ranks: int, batch: int, distinct: float | None = None) -> float:
    """How many of them are on the rank that has the most in a layer, on the average.

    A measured `distinct` is as far from random choice on every rank as it is over all.
    """
    share = 1.0 if distinct is None else distinct / distinct_experts(batch)
    return share * (distinct_experts(batch) if ranks == 1 else _largest_share(ranks, batch))


@functools.cache
def _largest_share(ranks: int, batch: int) -> float:
    experts, chosen = SIZES["num_experts"], SIZES["num_experts_per_tok"]
    chance = random.Random(0)
    draws = max(LEAST_DRAWS, DRAWN_TOKENS // batch)
    total = 0
    for _ in range(draws):
        counts = [0] * ranks
        for expert in {expert for _ in range(batch) for expert in chance.sample(range(experts), chosen)}:
            counts[expert * ranks // experts] += 1
        total += max(counts)
    return total / draws


def _matrix(layout: Layout, outputs: int, inputs: int) -> float:
    if layout.is_int8:
        return outputs * inputs + SCALE_BYTES * outputs
    return BF16_BYTES * outputs * inputs
