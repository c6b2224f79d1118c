# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sums inside a forward, each carrying the failure flag in its own payload.

Rules. Every rank of a step enters the same reductions in the same order. The flag is one more element behind the
payload: 1.0 from a rank that failed, summed like everything else, tested for > 0. A rank that fails calls
`report_failure`, which enters the next reduction with zeros and the flag, if the step has one left; every rank then
leaves the step with `PeerFailed`. The buffer is made at start for the largest step, so a failed allocation can
still be reported. No wait is unbounded: each ends with LinkLost at the deadline, or as soon as `check_peers` says
that a peer has gone.

Here: one rank, and ranks as threads of one process under a baton, whose sum is what the others are compared with. For
ranks in processes: `shared_memory` on one host and over hosts, `torch_distributed` anywhere; `rendezvous` chooses.

Shapes: T tokens of the step, H hidden size.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from metrale_ray.baton import Baton
from metrale_ray.clock import Clock
from metrale_ray.config import Phase
from metrale_ray.errors import LinkLost, PeerFailed

# How long one wait lasts before the peers are looked at again. A stopped peer is noticed by the link after seconds.
WAIT_SLICE_S = 0.5
# How long after a broken reduction the links are asked which peer has gone.
NAME_PEER_S = 2.0
# A number that is positive exactly when the float in its place is.
_SIGNED: dict[int, Any] = {2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


class Collectives(ABC):
    """One rank's end of the group. Not thread-safe: the rank's one engine thread calls it."""

    way = "one process"  # by which sums go, for people

    def __init__(self, rank: int, world: int, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: str):
        self.rank = rank
        self.world = world
        self.hidden_size = hidden_size
        self.clock: Clock = time.monotonic  # times the waits
        self.waited_s = 0.0  # in the reductions of this step
        self.num_sums = self.num_bytes = 0  # since the start, failures included
        self.sums_s = 0.0
        self.at_phase: Callable[[Phase, int], None] = _nothing  # called around each reduction, with its number
        self._layer = 0
        self._buffer = torch.zeros(max_tokens * hidden_size + 1, dtype=dtype, device=device)
        self._remaining = 0
        self._take(0)

    def begin(self, num_tokens: int, num_reductions: int) -> None:
        """Start a step of `num_tokens` rows and `num_reductions` reductions. Both follow from the command alone."""
        if num_tokens != self._num_tokens:
            self._take(num_tokens)
        self._remaining = num_reductions
        self._layer = 0
        self.waited_s = 0.0

    def payload(self) -> torch.Tensor:
        """The zeroed [T, H] part of the buffer: add this rank's share into it, then call `all_reduce`."""
        self.at_phase("before", self._layer)
        self._flat.zero_()
        return self._rows

    def all_reduce(self) -> torch.Tensor:
        """Sum the payload over the ranks in place and return it, valid until the next `payload`.

        Raises PeerFailed when any rank raised the flag, LinkLost when a peer does not come.
        """
        self._lower_flag()
        self.at_phase("inside", self._layer)
        self._timed_sum(self._flat)
        self._remaining -= 1
        if self._is_flag_up():
            self._remaining = 0
            raise PeerFailed("another rank failed in this step")
        self.at_phase("after", self._layer)
        self._layer += 1
        return self._rows

    def report_failure(self) -> None:
        """Tell the others in the next reduction of this step, if there is one. Raises LinkLost."""
        if self._remaining == 0:
            return
        self._flat.zero_()
        self._flat[-1] = 1.0
        self._remaining = 0
        self._timed_sum(self._flat)

    def _timed_sum(self, flat: torch.Tensor) -> None:
        started = self.clock()
        self._sum(flat)
        took_s = self.clock() - started
        self.waited_s += took_s
        self.sums_s += took_s
        self.num_sums += 1
        self.num_bytes += self._flat_bytes

    def _take(self, num_tokens: int) -> None:
        """Keep the buffer's views for so many tokens: making them costs more than a small sum."""
        self._num_tokens = num_tokens
        self._flat = self._buffer[: num_tokens * self.hidden_size + 1]
        self._rows = self._flat[:-1].view(num_tokens, self.hidden_size)
        self._flat_bytes = self._flat.nbytes
        self._flag: Any = None  # the flag's place in this process's memory, where it is there
        if self._buffer.device.type == "cpu":
            size = self._buffer.itemsize
            self._flag = _SIGNED[size].from_address(self._flat.data_ptr() + self._flat_bytes - size)

    def _lower_flag(self) -> None:
        if self._flag is None:
            self._flat[-1] = 0.0
        else:
            self._flag.value = 0

    def _is_flag_up(self) -> bool:
        return float(self._flat[-1]) > 0 if self._flag is None else self._flag.value > 0

    @abstractmethod
    def _sum(self, flat: torch.Tensor) -> None:
        """Sum `flat` over the ranks in place, to the same bits on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Calling it twice is allowed; it never waits for a peer."""


def _nothing(phase: Phase, layer: int) -> None:
    """Nobody watches."""


def name_lost_peer(check_peers: Callable[[], None]) -> None:
    """A broken reduction may not know why its peer has gone; the links do, a moment later. Raises their LinkLost."""
    deadline = time.monotonic() + NAME_PEER_S
    while time.monotonic() < deadline:
        check_peers()
        time.sleep(0.02)


def sum_in_rank_order(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The plain sum: rank after rank, in fp32 at least, rounded once to the payloads' dtype."""
    dtype = payloads[0].dtype
    total = payloads[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for payload in payloads[1:]:
        total += payload
    return total.to(dtype)


class OneRank(Collectives):
    """A group of one: sums are what they are."""

    def _sum(self, flat: torch.Tensor) -> None:
        """The sum over one rank is there already."""

    def close(self) -> None:
        """There is nobody to leave."""


class InProcessGroup:
    """What the ranks of one process share: a place for each rank's payload and the sum's generation."""

    def __init__(self, baton: Baton, world: int) -> None:
        self.baton = baton
        self.world = world
        self.payloads: dict[int, torch.Tensor] = {}
        self.results: dict[int, torch.Tensor] = {}
        self.gone: dict[int, str] = {}

    def enter(self, rank: int, flat: torch.Tensor) -> None:
        """Give one rank's payload; the last to come adds all of them in rank order, for everybody."""
        self.payloads[rank] = flat.clone()
        if len(self.payloads) < self.world:
            return
        if len({p.shape for p in self.payloads.values()}) != 1:
            raise AssertionError(f"ranks entered unlike reductions: {[p.shape for p in self.payloads.values()]}")
        total = sum_in_rank_order([self.payloads[rank] for rank in range(self.world)])
        self.payloads = {}
        self.results = dict.fromkeys(range(self.world), total)


class InProcess(Collectives):
    """Ranks as threads that hand over one baton. Sums run in rank order, so they have the same bits everywhere."""

    def __init__(
        self,
        group: InProcessGroup,
        rank: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        timeout_s: float | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(rank, group.world, max_tokens, hidden_size, dtype, device)
        self._group = group
        self._timeout_s = timeout_s

    def _sum(self, flat: torch.Tensor) -> None:
        group = self._group
        group.enter(self.rank, flat)
        came = group.baton.wait_until(
            lambda: self.rank in group.results or bool(group.gone), self._timeout_s, f"reduction of rank {self.rank}"
        )
        if self.rank in group.results:
            flat.copy_(group.results.pop(self.rank))
            return
        missing = sorted(set(range(group.world)) - set(group.payloads))
        reason = "; ".join(f"rank {r}: {why}" for r, why in group.gone.items()) if came else "deadline passed"
        raise LinkLost(
            f"a reduction did not complete, without rank {missing}: {reason}", rank=next(iter(missing), None)
        )

    def close(self) -> None:
        self._group.gone.setdefault(self.rank, "left the group")
