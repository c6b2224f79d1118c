# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sums between ranks by torch.distributed: gloo on CPU, NCCL on GPU. And the store by which the ranks find each other.

Rules: the head makes the store, and all its addresses are the node's own. No wait is unbounded: while a sum is under
way the peers are looked at every WAIT_SLICE_S, and it ends with LinkLost at its deadline.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from metrale_ray.errors import LinkLost
from metrale_ray.model.collectives import WAIT_SLICE_S, Collectives, name_lost_peer


class TorchGroup:
    """One rank's end of a group. `check_peers` raises LinkLost when a peer has gone.

    Joining raises LinkLost when the others do not come within `timeout_s`.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        device: str,
        *,
        store: Any,
        host: str,
        timeout_s: float,
        check_peers: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._check_peers = check_peers
        self._is_broken = False  # a reduction was given up
        self._group: Any = _make_group(store, rank, world, device, host, timeout_s)

    def sum(self, flat: torch.Tensor) -> None:
        """Sum `flat` over the ranks in place, to the same bits on every rank. Raises LinkLost."""
        self._run(lambda group: group.allreduce([flat]))

    def gather(self, flat: torch.Tensor, into: torch.Tensor | None) -> None:
        """Give the group's first rank what every rank has in `flat`, row by row `into` there. Raises LinkLost."""
        options = dist.GatherOptions()
        options.rootRank = 0
        outputs = [] if into is None else [list(into.unbind())]
        self._run(lambda group: group.gather(outputs, [flat], options))

    def _run(self, start: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise LinkLost("the group of ranks was closed", rank=self._rank)
        self._is_broken = True
        try:
            self._wait(start(self._group))
            self._is_broken = False
        except RuntimeError as error:  # torch reports a closed connection and its own timeout this way
            name_lost_peer(self._check_peers)
            raise LinkLost(f"a reduction between the ranks failed: {error}") from error

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


class TorchDistributed(Collectives):
    """Every rank in one group."""

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
        self.way = "NCCL" if device.startswith("cuda") else "gloo"
        self._group = TorchGroup(
            rank, world, device, store=store, host=host, timeout_s=timeout_s, check_peers=check_peers
        )

    def _sum(self, flat: torch.Tensor) -> None:
        self._group.sum(flat)

    def _gather(self, mine_I: torch.Tensor, pieces_GI: torch.Tensor | None) -> None:
        self._group.gather(mine_I, pieces_GI)

    def close(self) -> None:
        """Leave the group; see TorchGroup."""
        self._group.close()


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
        raise LinkLost(f"the ranks' meeting point at {host}:{port} cannot be reached: {first_line(error)}") from error


def _make_group(store: Any, rank: int, world: int, device: str, host: str, timeout_s: float) -> Any:
    try:
        return _join_group(store, rank, world, device, host, timeout_s)
    except RuntimeError as error:  # torch's for a peer that does not come, or cannot be reached
        raise LinkLost(
            f"rank {rank} at {host} could not join the other ranks within {timeout_s:g} s; every node must be able to "
            f"open TCP connections to every other one: {first_line(error)}"
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


def first_line(error: BaseException) -> str:
    """Of torch's messages the line for people; the others are its own stack."""
    return str(error).strip().partition("\n")[0]
