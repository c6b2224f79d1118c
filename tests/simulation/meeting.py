# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Meeting`: the sums between the ranks of one life of a group, and `SimCollectives`, one rank's end of it.

Rules: a sum is complete a drawn while after the last rank has entered it, when none of them is stopped and no partition
lies between them. Sums run in rank order, so they have the same bits everywhere. As with gloo, a rank that leaves or
dies breaks the sums of the others soon; a rank that only does not come is found by the links, or at the deadline.

What it leaves out: moving the payloads over the network: a sum has no frames, and so no faults of frames.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch

from metrale_ray.baton import Baton, Process
from metrale_ray.errors import LinkLost
from metrale_ray.model.collectives import (
    NAME_PEER_S,
    WAIT_SLICE_S,
    Collectives,
    Combine,
    in_rank_order,
    sum_in_rank_order,
)
from tests.simulation.faults import Fault, SumFault
from tests.simulation.network import Network

SUM_S = (2e-5, 5e-4)
"""How long a sum takes once all have come: the only time that a step takes here."""

BROKEN_S = (1e-4, 0.02)
"""Until a rank learns that another one has left the group."""

NAME_PEER_POLL_S = 0.1
"""How often a rank whose sum broke looks for the peer that has gone."""


class Meeting:
    """What the ranks of one life share. `violations`: what no ranks in step may do, whatever goes wrong."""

    def __init__(self, baton: Baton, network: Network, world: int, chance: random.Random, faults: Iterable[Fault]):
        self.baton = baton
        self.world = world
        self.fired: list[Fault] = network.fired
        self.violations: list[str] = []
        self.gone: dict[int, str] = {}
        self.chance = chance
        self.faults = {(f.rank, f.number): f for f in faults if isinstance(f, SumFault)}
        self._network = network
        self._processes: dict[int, Process] = {}
        self._payloads: dict[int, tuple[Combine, torch.Tensor]] = {}
        self._results: dict[int, torch.Tensor] = {}
        self._is_due = False  # the last rank has entered, and the time that the sum takes has passed

    def join(self, rank: int, process: Process) -> None:
        """A rank comes into the group."""
        self._processes[rank] = process
        process.at_change.append(self._process_changed)

    def enter(self, rank: int, flat: torch.Tensor, combine: Combine) -> None:
        """Give one rank's payload, and say what it takes to become of all of them."""
        self._payloads[rank] = combine, flat.clone()
        if len(self._payloads) < self.world:
            return
        if len({(combine, payload.shape) for combine, payload in self._payloads.values()}) != 1:
            entered = [self._payloads[rank] for rank in range(self.world)]
            shapes = [(combine.__name__, tuple(payload.shape)) for combine, payload in entered]
            self.violations.append(f"the ranks entered unlike sums: {shapes}")
            self.leave(rank, "entered another sum than the others")
            return
        self.baton.call_in(self.chance.uniform(*SUM_S), self._pass_time)

    def take(self, rank: int) -> torch.Tensor | None:
        """The sum, once, when it is complete."""
        if self._is_due and self._can_complete():
            self._complete()
        return self._results.pop(rank, None)

    def has_news(self, rank: int) -> bool:
        """Whether the sum that the rank is in is complete, or never will be."""
        return rank in self._results or bool(self.gone) or (self._is_due and self._can_complete())

    def leave(self, rank: int, why: str) -> None:
        """A rank has left; the others learn of it soon. A dead process cannot say so."""
        process = self._processes.get(rank)
        if rank not in self.gone and process is not None and not process.is_dead:
            self.baton.call_in(self.chance.uniform(*BROKEN_S), lambda: self.gone.setdefault(rank, why))

    def _pass_time(self) -> None:
        self._is_due = True

    def _complete(self) -> None:
        combine, _ = self._payloads[0]
        total = combine([self._payloads[rank][1] for rank in range(self.world)])
        self._payloads, self._is_due = {}, False
        self._results = dict.fromkeys(range(self.world), total)

    def _can_complete(self) -> bool:
        names = [process.name for _, process in sorted(self._processes.items())]
        is_cut = self._network.is_cut
        return not any(process.is_stopped for process in self._processes.values()) and not any(
            is_cut(a, b) for a in names for b in names if a != b
        )

    def _process_changed(self) -> None:
        for rank, process in self._processes.items():
            if process.is_dead and rank not in self.gone and not self._network.is_silent_death(process):
                self.baton.call_in(
                    self.chance.uniform(*BROKEN_S), lambda rank=rank: self.gone.setdefault(rank, "its process has gone")
                )


class SimCollectives(Collectives):
    """One rank's end of a `Meeting`. A group of one takes time for its sums too."""

    def __init__(
        self,
        meeting: Meeting,
        process: Process,
        rank: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        timeout_s: float,
        check_peers: Callable[[], None],
    ) -> None:
        super().__init__(rank, meeting.world, max_tokens, hidden_size, dtype, "cpu")
        self._meeting = meeting
        self._process = process
        self._timeout_s = timeout_s
        self._check_peers = check_peers
        self._num_entered = 0
        meeting.join(rank, process)

    def _sum(self, flat: torch.Tensor) -> None:
        flat.copy_(self._exchange(flat, sum_in_rank_order))

    def _gather(self, mine_I: torch.Tensor, pieces_GI: torch.Tensor | None) -> None:
        found_GI = self._exchange(mine_I, in_rank_order)
        if pieces_GI is not None:
            pieces_GI.copy_(found_GI)

    def _exchange(self, flat: torch.Tensor, combine: Combine) -> torch.Tensor:
        self._num_entered += 1
        meeting, baton = self._meeting, self._meeting.baton
        fault = meeting.faults.get((self.rank, self._num_entered))
        if fault is not None:
            self._suffer(fault)
        baton.hand_over()  # so that a dead rank enters nothing
        meeting.enter(self.rank, flat, combine)
        if fault is not None and fault.kind == "kill":
            self._process.kill()
        return self._wait()

    def _suffer(self, fault: SumFault) -> None:
        meeting, baton = self._meeting, self._meeting.baton
        meeting.fired.append(fault)
        if fault.kind == "delay":
            baton.wait_until(lambda: False, fault.amount, "a slow rank")
        elif fault.kind == "never":
            baton.wait_until(lambda: False, None, "nothing: this rank hangs")
        elif fault.amount < 0.5:
            self._process.kill()

    def _wait(self) -> torch.Tensor:
        meeting, waited_s = self._meeting, 0.0
        while True:
            what = f"the sum of rank {self.rank}"
            came = meeting.baton.wait_until(lambda: meeting.has_news(self.rank), WAIT_SLICE_S, what)
            total = meeting.take(self.rank)
            if total is not None:
                return total
            if came:
                self._name_lost_peer()
                reasons = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(meeting.gone.items()))
                raise LinkLost(f"a reduction between the ranks failed: {reasons}")
            waited_s += WAIT_SLICE_S
            self._check_peers()
            if waited_s >= self._timeout_s:
                raise LinkLost(f"a reduction between the ranks did not complete within {self._timeout_s:g} s")

    def _name_lost_peer(self) -> None:
        """A broken reduction names no rank; the links do, a moment later."""
        baton = self._meeting.baton
        deadline = baton.now + NAME_PEER_S
        while baton.now < deadline:
            self._check_peers()
            baton.wait_until(lambda: False, NAME_PEER_POLL_S, "the link to the peer that has gone")

    def close(self) -> None:
        """Leave the group. Of a dead process it does nothing."""
        self._meeting.leave(self.rank, "left the group")
