# SPDX-License-Identifier: MIT OR Apache-2.0
"""`DenseShare`: what one rank holds of everything but experts, routers and norms.

Rules. Where attention is replicated each rank holds all of it. Where it is split, each holds a run of key and value
heads with the query heads that use them, of the rows of the vocabulary, and of the inner dimension of dense layers: as
even as they can be, the earlier ranks holding more. A rank may hold none of something and takes part in every sum all
the same. Runs begin at multiples of a unit that suits matrix kernels, where that leaves the ranks nearly equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.experts.placement import experts_of

# Whole blocks of outputs (16) and tiles of inputs (32, 64) for the kernels.
UNITS = (64, 16)
# So many units for each rank: the largest share is then at most an eighth above the mean.
MIN_UNITS_PER_RANK = 8


@dataclass(frozen=True, slots=True)
class DenseShare:
    """Ranges over the whole model: heads of queries and of keys and values, vocabulary rows, inner dimension."""

    is_split: bool
    heads: range
    kv_heads: range
    vocabulary: range
    inner: range
    has_biases: bool
    """Of products whose outputs are summed over the ranks: one rank adds them."""


def dense_share(config: DecoderConfig, rank: int, world: int, *, is_split: bool) -> DenseShare:
    """The share of `rank` in a group of `world`. Raises ValueError for a rank outside the group."""
    if not is_split:
        rank, world = 0, 1
    kv_heads = experts_of(config.num_kv_heads, rank, world)
    group = config.num_heads // config.num_kv_heads
    return DenseShare(
        is_split=is_split,
        heads=range(kv_heads.start * group, kv_heads.stop * group),
        kv_heads=kv_heads,
        vocabulary=even_part(config.vocab_size, rank, world),
        inner=even_part(config.intermediate_size, rank, world),
        has_biases=rank == 0,
    )


def even_part(total: int, rank: int, world: int) -> range:
    """The run of `rank` of `total` items."""
    unit = next((unit for unit in UNITS if total >= MIN_UNITS_PER_RANK * unit * world), 1)
    units = experts_of(-(-total // unit), rank, world)
    return range(min(units.start * unit, total), min(units.stop * unit, total))


def vocabulary_widths(config: DecoderConfig, world: int) -> Sequence[int]:
    """Rows of the vocabulary on each rank of a group that splits it."""
    return [len(even_part(config.vocab_size, rank, world)) for rank in range(world)]


def local_config(config: DecoderConfig, share: DenseShare) -> DecoderConfig:
    """The decoder as one rank computes it: its own heads and inner dimension. The vocabulary stays the model's."""
    return replace(
        config,
        num_heads=len(share.heads),
        num_kv_heads=len(share.kv_heads),
        intermediate_size=len(share.inner),
    )
