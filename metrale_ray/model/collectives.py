# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sums inside a forward, each carrying the failure flag in its own payload.

Rules. Every rank of a step enters the same reductions in the same order. The flag is one more element behind the
payload: 1.0 from a rank that failed, summed like everything else, tested for > 0. A rank that fails calls
`report_failure`, which enters the next reduction with zeros and the flag, if the step has one left; every rank then
leaves the step with `PeerFailed`. The buffer is made at start for the largest step, so a failed allocation can
still be reported. No wait is unbounded: each ends with LinkLost at the deadline, or as soon as `check_peers` says
that a peer has gone.

Three implementations: one rank, ranks as threads of one process under a baton, and torch.distributed.

Shapes: T tokens of the step, H hidden size.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from metrale_ray.baton import Baton
from metrale_ray.clock import Clock
from metrale_ray.config import Phase
from metrale_ray.errors import LinkLost, PeerFailed

log = logging.getLogger(__name__)

# How long one wait lasts before the peers are looked at again. A stopped peer is noticed by the link after seconds.
WAIT_SLICE_S = 0.5
# How long after a broken reduction the links are asked which peer has gone.
NAME_PEER_S = 2.0


class Collectives(ABC):
    """One rank's end of the group. Not thread-safe: the rank's one engine thread calls it."""

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
        self._num_tokens = 0
        self._remaining = 0

    def begin(self, num_tokens: int, num_reductions: int) -> None:
        """Start a step of `num_tokens` rows and `num_reductions` reductions. Both follow from the command alone."""
        self._num_tokens = num_tokens
        self._remaining = num_reductions
        self._layer = 0
        self.waited_s = 0.0

    def payload(self) -> torch.Tensor:
        """The zeroed [T, H] part of the buffer: add this rank's share into it, then call `all_reduce`."""
        self.at_phase("before", self._layer)
        flat = self._flat()
        flat.zero_()
        return flat[:-1].view(self._num_tokens, self.hidden_size)

    def all_reduce(self) -> torch.Tensor:
        """Sum the payload over the ranks in place and return it, valid until the next `payload`.

        Raises PeerFailed when any rank raised the flag, LinkLost when a peer does not come.
        """
        flat = self._flat()
        flat[-1] = 0.0
        self.at_phase("inside", self._layer)
        self._timed_sum(flat)
        self._remaining -= 1
        if float(flat[-1]) > 0:
            self._remaining = 0
            raise PeerFailed("another rank failed in this step")
        self.at_phase("after", self._layer)
        self._layer += 1
        return flat[:-1].view(self._num_tokens, self.hidden_size)

    def report_failure(self) -> None:
        """Tell the others in the next reduction of this step, if there is one. Raises LinkLost."""
        if self._remaining == 0:
            return
        flat = self._flat()
        flat.zero_()
        flat[-1] = 1.0
        self._remaining = 0
        self._timed_sum(flat)

    def _timed_sum(self, flat: torch.Tensor) -> None:
        started = self.clock()
        self._sum(flat)
        took_s = self.clock() - started
        self.waited_s += took_s
        self.sums_s += took_s
        self.num_sums += 1
        self.num_bytes += flat.nbytes

    def _flat(self) -> torch.Tensor:
        return self._buffer[: self._num_tokens * self.hidden_size + 1]

    @abstractmethod
    def _sum(self, flat: torch.Tensor) -> None:
        """Sum `flat` over the ranks in place, to the same bits on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Calling it twice is allowed; it never waits for a peer."""


def _nothing(phase: Phase, layer: int) -> None:
    """Nobody watches."""


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
        total = self.payloads[0].clone()
        for other in range(1, self.world):
            total += self.payloads[other]
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


class TorchDistributed(Collectives):
    """gloo on CPU, NCCL on GPU. The head makes the store; `check_peers` raises LinkLost when a peer has gone."""

    def __init__(
        self,
        rank: int,
        world: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        store: Any,
        host: str,
        timeout_s: float,
        check_peers: Callable[[], None],
    ) -> None:
        super().__init__(rank, world, max_tokens, hidden_size, dtype, device)
        self._timeout_s = timeout_s
        self._check_peers = check_peers
        self._is_broken = False  # a reduction was given up
        self._group: Any = _make_group(store, rank, world, device, host, timeout_s)

    def _sum(self, flat: torch.Tensor) -> None:
        if self._group is None:
            raise LinkLost("the group of ranks was closed", rank=self.rank)
        self._is_broken = True
        try:
            work = self._group.allreduce([flat])
            self._wait(work)
            self._is_broken = False
        except RuntimeError as error:  # torch reports a closed connection and its own timeout this way
            self._name_lost_peer()
            raise LinkLost(f"a reduction between the ranks failed: {error}") from error

    def _name_lost_peer(self) -> None:
        """A broken reduction names no rank; the links do, a moment later."""
        deadline = time.monotonic() + NAME_PEER_S
        while time.monotonic() < deadline:
            self._check_peers()
            time.sleep(0.02)

    def _wait(self, work: Any) -> None:
        waited_s = 0.0
        while not _wait_slice(work):
            waited_s += WAIT_SLICE_S
            self._check_peers()
            if waited_s >= self._timeout_s:
                raise LinkLost(f"a reduction between the ranks did not complete within {self._timeout_s:g} s")

    def close(self) -> None:
        """Leave the group. One that still waits for a peer is kept for good.

        Destroying it would wait for gloo's own timeout, holding the interpreter's lock, so the whole process would
        stand still. It happens once per lost peer, and the process usually ends next.
        """
        group, self._group = self._group, None
        if group is not None and self._is_broken:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _wait_slice(work: Any) -> bool:
    """Whether the work is done after one slice. Raises RuntimeError when it failed for good."""
    try:
        work.wait(timedelta(seconds=WAIT_SLICE_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # done just after the slice's end: this raises if it failed, and else returns at once
    return True


def _tcp_store(*args: Any, **options: Any) -> Any:
    return dist.TCPStore(*args, **options)  # type: ignore[attr-defined]  # torch does not export it to type checkers


def host_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """The rendezvous store of one group, listening on `host` alone, and its port. The head keeps it."""
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = _tcp_store(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,  # the only server that takes a socket that is bound already
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """A worker's way to the head's store. Raises LinkLost where it cannot be reached."""
    limit = timedelta(seconds=timeout_s)
    try:
        return _tcp_store(host, port, is_master=False, timeout=limit, wait_for_workers=False, use_libuv=True)
    except RuntimeError as error:
        raise LinkLost(f"the ranks' meeting point at {host}:{port} cannot be reached: {_first_line(error)}") from error


def _make_group(store: Any, rank: int, world: int, device: str, host: str, timeout_s: float) -> Any:
    try:
        return _join_group(store, rank, world, device, host, timeout_s)
    except RuntimeError as error:  # torch's for a peer that does not come, or cannot be reached
        raise LinkLost(
            f"rank {rank} at {host} could not join the other ranks within {timeout_s:g} s; every node must be able to "
            f"open TCP connections to every other one: {_first_line(error)}"
        ) from error


def _join_group(store: Any, rank: int, world: int, device: str, host: str, timeout_s: float) -> Any:
    if device.startswith("cuda"):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, rank, world, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to name the address
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1  # one reduction is in flight at a time
    return dist.ProcessGroupGloo(store, rank, world, options)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
