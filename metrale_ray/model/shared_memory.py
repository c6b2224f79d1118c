# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SharedMemory`: sums between ranks that are all on one host. `Hierarchical`: sums over several hosts.

Rules. Through shared memory ranks are added in their order, in fp32, and rounded once, so that all have the same bits.
Over several hosts each host's ranks are summed first, then what the hosts' first ranks have goes over the network, and
each of them gives the result to its host: the same bits again, as the network's sum has the same on all that take part.
"""

from __future__ import annotations

import torch

from metrale_ray.model.collectives import Collectives
from metrale_ray.model.segment import SegmentEnd
from metrale_ray.model.torch_distributed import TorchGroup


class SharedMemory(Collectives):
    """All ranks of the group, on one host."""

    way = "shared memory"

    def __init__(
        self, rank: int, world: int, max_tokens: int, hidden_size: int, dtype: torch.dtype, *, end: SegmentEnd
    ) -> None:
        super().__init__(rank, world, max_tokens, hidden_size, dtype, "cpu")
        self._end = end

    def _sum(self, flat: torch.Tensor) -> None:
        self._end.sum(flat)

    def close(self) -> None:
        """Leave the group."""
        self._end.close()


class Hierarchical(Collectives):
    """Ranks on several hosts. `end`: with the others of this host, None for one that is alone there. `leaders`: the
    hosts' first ranks, None for the other ones. `leader` is this host's first rank.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        end: SegmentEnd | None,
        leaders: TorchGroup | None,
        leader: int,
        num_hosts: int,
    ) -> None:
        super().__init__(rank, world, max_tokens, hidden_size, dtype, "cpu")
        self.way = f"shared memory on each host, gloo between the {num_hosts} hosts"
        self._end = end
        self._leaders = leaders
        self._leader = leader

    def _sum(self, flat: torch.Tensor) -> None:
        if self._end is not None:
            self._end.sum(flat)
        if self._leaders is not None:
            self._leaders.sum(flat)
        if self._end is not None:
            self._end.broadcast(self._leader, flat)

    def close(self) -> None:
        """Leave both groups."""
        if self._end is not None:
            self._end.close()
        if self._leaders is not None:
            self._leaders.close()
