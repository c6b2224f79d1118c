# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sums inside a forward, each carrying the failure flag in its own payload.

Rules. Every rank of a step enters the same reductions in the same order. The flag is one more element behind the
payload: 1.0 from a rank that failed, summed like everything else, tested for > 0. A rank that fails calls
`report_failure`, which enters the next reduction with zeros and the flag, if the step has one left; every rank then
leaves the step with `PeerFailed`. The buffer is made at start for the largest step, so a failed allocation can
still be reported. No wait is unbounded: each ends with LinkLost at the deadline, or as soon as `check_peers` says
that a peer has gone.

A step may end with one gather, by which rank 0 gets rows of which every rank has computed some columns. It has the flag
too, which rank 0 alone gets to see: nothing follows it, so the others need not know. What a step has of either follows
from its command, so a rank that fails knows which comes next, and of what size.

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
from metrale_ray.model.gathering import Gathering

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
        self._rows_to_gather = 0
        self._gathering: Gathering | None = None
        self._take(0)

    def plan_gather(self, widths: Sequence[int]) -> None:
        """From now on steps may gather, of each row so many columns from each rank. Called once, before the first."""
        self._gathering = Gathering(self.rank, widths, self._buffer.device)

    def begin(self, num_tokens: int, num_reductions: int, num_gathered_rows: int = 0) -> None:
        """Start a step of `num_tokens` rows and `num_reductions` reductions, and a gather of so many rows if any.

        All of them follow from the command alone.
        """
        if num_tokens != self._num_tokens:
            self._take(num_tokens)
        self._remaining = num_reductions
        self._rows_to_gather = num_gathered_rows
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
            self._remaining = self._rows_to_gather = 0
            raise PeerFailed("another rank failed in this step")
        self.at_phase("after", self._layer)
        self._layer += 1
        return self._rows

    def gather(self, part_RW: torch.Tensor) -> torch.Tensor | None:
        """Give rank 0 this rank's columns [R, W], fp32, of the step's rows: the step's last collective.

        Gives the whole rows [R, V] on rank 0, valid until the next gather, and None elsewhere. Raises PeerFailed on
        rank 0 when any rank raised the flag, LinkLost when a peer does not come.
        """
        self.at_phase("before", self._layer)
        rows_RV = self._required_gathering().room(self._rows_to_gather)
        self.at_phase("inside", self._layer)
        if self._timed_gather(part_RW, rows_RV):
            raise PeerFailed("another rank failed in this step")
        self.at_phase("after", self._layer)
        self._layer += 1
        return rows_RV

    def report_failure(self) -> None:
        """Tell the others in the next collective of this step, if there is one. Raises LinkLost."""
        if self._remaining == 0:
            if self._rows_to_gather:
                self._timed_gather(None, None)
            return
        self._flat.zero_()
        self._flat[-1] = 1.0
        self._remaining = self._rows_to_gather = 0
        self._timed_sum(self._flat)

    def _timed_sum(self, flat: torch.Tensor) -> None:
        started = self.clock()
        self._sum(flat)
        self._note_time(started)
        self.num_bytes += self._flat_bytes

    def _timed_gather(self, part_RW: torch.Tensor | None, into_RV: torch.Tensor | None) -> bool:
        """Go through all pieces, also once a flag is seen, as the others do. Whether one was up, on rank 0."""
        num_rows, self._rows_to_gather = self._rows_to_gather, 0
        gathering, has_failed = self._required_gathering(), False
        started = self.clock()
        for rows, mine_I, pieces_GI in gathering.pieces(num_rows, part_RW):
            self._gather(mine_I, pieces_GI)
            if pieces_GI is not None:
                has_failed |= gathering.take(rows, pieces_GI, into_RV)
            self.num_bytes += mine_I.nbytes
        self._note_time(started)
        return has_failed

    def _note_time(self, started: float) -> None:
        took_s = self.clock() - started
        self.waited_s += took_s
        self.sums_s += took_s
        self.num_sums += 1

    def _required_gathering(self) -> Gathering:
        assert self._gathering is not None, "a step gathers only where that was planned"
        return self._gathering

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
    def _gather(self, mine_I: torch.Tensor, pieces_GI: torch.Tensor | None) -> None:
        """Give rank 0 what every rank has in `mine_I`, in rank order: into `pieces_GI`, which is None elsewhere."""

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


def in_rank_order(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The payloads one below the other."""
    return torch.stack(list(payloads))


class OneRank(Collectives):
    """A group of one: sums are what they are."""

    def _sum(self, flat: torch.Tensor) -> None:
        """The sum over one rank is there already."""

    def _gather(self, mine_I: torch.Tensor, pieces_GI: torch.Tensor | None) -> None:
        assert pieces_GI is not None, "the only rank is rank 0"
        pieces_GI[0].copy_(mine_I)

    def close(self) -> None:
        """There is nobody to leave."""


Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""What becomes of all ranks' payloads, in rank order."""


class InProcessGroup:
    """What the ranks of one process share: a place for each rank's payload, and what became of all of them."""

    def __init__(self, baton: Baton, world: int) -> None:
        self.baton = baton
        self.world = world
        self.payloads: dict[int, tuple[Combine, torch.Tensor]] = {}
        self.results: dict[int, torch.Tensor] = {}
        self.gone: dict[int, str] = {}

    def enter(self, rank: int, flat: torch.Tensor, combine: Combine) -> None:
        """Give one rank's payload; the last to come combines all of them in rank order, for everybody."""
        self.payloads[rank] = combine, flat.clone()
        if len(self.payloads) < self.world:
            return
        entered = [self.payloads[rank] for rank in range(self.world)]
        if len({(combine, payload.shape) for combine, payload in entered}) != 1:
            told = [(combine.__name__, tuple(payload.shape)) for combine, payload in entered]
            raise AssertionError(f"ranks entered unlike collectives: {told}")
        result = combine([payload for _, payload in entered])
        self.payloads = {}
        self.results = dict.fromkeys(range(self.world), result)


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
        flat.copy_(self._exchange(flat, sum_in_rank_order))

    def _gather(self, mine_I: torch.Tensor, pieces_GI: torch.Tensor | None) -> None:
        found_GI = self._exchange(mine_I, in_rank_order)
        if pieces_GI is not None:
            pieces_GI.copy_(found_GI)

    def _exchange(self, flat: torch.Tensor, combine: Combine) -> torch.Tensor:
        group = self._group
        group.enter(self.rank, flat, combine)
        came = group.baton.wait_until(
            lambda: self.rank in group.results or bool(group.gone), self._timeout_s, f"reduction of rank {self.rank}"
        )
        if self.rank in group.results:
            return group.results.pop(self.rank)
        missing = sorted(set(range(group.world)) - set(group.payloads))
        reason = "; ".join(f"rank {r}: {why}" for r, why in group.gone.items()) if came else "deadline passed"
        raise LinkLost(
            f"a reduction did not complete, without rank {missing}: {reason}", rank=next(iter(missing), None)
        )

    def close(self) -> None:
        self._group.gone.setdefault(self.rank, "left the group")
