# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SharedMemory`: sums between ranks that are all on one host. `Hierarchical`: sums over several hosts.

Rules. Through shared memory ranks are added in their order, in fp32, and rounded once, so that all have the same bits.
Over several hosts each host's ranks are summed first, then what the hosts' first ranks have goes over the network, and
each of them gives the result to its host: the same bits again, as the network's sum has the same on all that take part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metrale_ray.model import gathering
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

    def _gather(self, mine_I: torch.Tensor, pieces_GI: torch.Tensor | None) -> None:
        self._end.gather(0, mine_I, pieces_GI)

    def close(self) -> None:
        """Leave the group."""
        self._end.close()


class Hierarchical(Collectives):
    """Ranks on several hosts. `end`: with the others of this host, None for one that is alone there. `leaders`: the
    hosts' first ranks, None for the other ones. `hosts` are the ranks by hosts, in the order of their first ranks.
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
        hosts: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(rank, world, max_tokens, hidden_size, dtype, "cpu")
        self.way = f"shared memory on each host, gloo between the {len(hosts)} hosts"
        self._end = end
        self._leaders = leaders
        self._hosts = [list(ranks) for ranks in hosts]
        self._mine = next(ranks for ranks in self._hosts if rank in ranks)
        self._leader = self._mine[0]
        self._of_host, self._of_hosts = torch.empty(0), torch.empty(0)  # pieces of a gather on their way

    def _sum(self, flat: torch.Tensor) -> None:
        if self._end is not None:
            self._end.sum(flat)
        if self._leaders is not None:
            self._leaders.sum(flat)
        if self._end is not None:
            self._end.broadcast(self._leader, flat)

    def plan_gather(self, widths: Sequence[int]) -> None:
        """See Collectives. A host's first rank has room for the pieces of its host, and rank 0 for those of all."""
        super().plan_gather(widths)
        num_items = self._required_gathering().largest * max(map(len, self._hosts))
        if self.rank == self._leader:
            self._of_host = torch.zeros(num_items, dtype=gathering.DTYPE)
        if self.rank == 0:
            self._of_hosts = torch.zeros(num_items * len(self._hosts), dtype=gathering.DTYPE)

    def _gather(self, mine_I: torch.Tensor, pieces_GI: torch.Tensor | None) -> None:
        """Each host's pieces come to its first rank, and from there to rank 0, which is the first of the first host.

        A host with fewer ranks than another one sends what lies behind its pieces too, as gloo wants equal sizes.
        """
        most, num_items = max(map(len, self._hosts)), mine_I.numel()
        is_leader = self.rank == self._leader
        of_host_LI = self._of_host[: most * num_items].view(most, num_items) if is_leader else None
        if self._end is not None:
            into = None if of_host_LI is None else of_host_LI[: len(self._mine)]
            self._end.gather(self._leader, mine_I, into)
        elif of_host_LI is not None:
            of_host_LI[0].copy_(mine_I)
        if self._leaders is None or of_host_LI is None:
            return
        if pieces_GI is None:
            self._leaders.gather(of_host_LI, None)
            return
        of_hosts = self._of_hosts[: len(self._hosts) * most * num_items].view(-1, most, num_items)
        self._leaders.gather(of_host_LI, of_hosts)
        for ranks, of_host in zip(self._hosts, of_hosts, strict=True):
            pieces_GI[ranks] = of_host[: len(ranks)]

    def close(self) -> None:
        """Leave both groups."""
        if self._end is not None:
            self._end.close()
        if self._leaders is not None:
            self._leaders.close()
