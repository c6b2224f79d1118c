# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which rank holds which experts: contiguous runs, as even as they can be, the earlier ranks holding one more.

Any number of experts over any number of ranks: 8 over 3 gives 3, 3, 2; 2 over 4 gives 1, 1, 0, 0. A rank without
experts takes part in every reduction all the same. Experts are replicated nowhere.
"""

from __future__ import annotations


def experts_of(num_experts: int, rank: int, world: int) -> range:
    """The global ids of the experts of `rank`, possibly none. Raises ValueError for a rank outside the group."""
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in a group of {world}")
    share, left_over = divmod(num_experts, world)
    first = rank * share + min(rank, left_over)
    return range(first, first + share + (rank < left_over))


def rank_of(expert: int, num_experts: int, world: int) -> int:
    """The rank that holds `expert`. Raises ValueError for an expert that does not exist."""
    if not 0 <= expert < num_experts:
        raise ValueError(f"expert {expert} is not one of {num_experts}")
    return next(rank for rank in range(world) if expert in experts_of(num_experts, rank, world))
