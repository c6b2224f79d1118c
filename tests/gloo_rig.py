# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks as real processes joined by gloo or by shared memory, each running one function of a test."""

from __future__ import annotations

import itertools
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from metrale_ray.model.collectives import Collectives
from metrale_ray.model.rendezvous import Way, join_ranks
from metrale_ray.model.torch_distributed import TorchDistributed, host_store, join_store

HOST = "127.0.0.1"
RESULT_TIMEOUT_S = 90.0
PRELOADED = ["metrale_ray.model.transformer"]  # imported once, before the processes part

Task = Callable[..., Any]


class Ranks:
    """Processes that run `task(join, *arguments)`, where `join(...)` gives the rank's collectives.

    `hosts` names the host that each rank takes itself to be on; None: all go by gloo, without asking. `task` is a
    function at the top level of a test file, as a new interpreter imports it.
    """

    def __init__(self, world: int, task: Task, *arguments: Any, hosts: Sequence[str] | None = None) -> None:
        self._store, port = host_store(HOST, RESULT_TIMEOUT_S)  # it lives as long as the ranks
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.processes = []
        self._results: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(theirs, rank, world, port, hosts, task, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._results.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process, result in zip(self.processes, self._results, strict=True):
            process.kill()
            process.join()
            result.close()

    def result(self, rank: int) -> Any:
        """What the task of `rank` gave; an error of it is raised here."""
        if not self._results[rank].poll(RESULT_TIMEOUT_S):
            raise TimeoutError(f"rank {rank} gave no result within {RESULT_TIMEOUT_S:g} s")
        ok, value = self._results[rank].recv()
        if not ok:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        return value

    def results(self) -> list[Any]:
        """What the task of each rank gave."""
        return [self.result(rank) for rank in range(len(self.processes))]


def _run(
    out: Connection,
    rank: int,
    world: int,
    port: int,
    hosts: Sequence[str] | None,
    task: Task,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    groups = itertools.count()

    def join(
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
        timeout_s: float = 60.0,
        check_peers: Callable[[], None] = lambda: None,
    ) -> Collectives:
        store = dist.PrefixStore(str(next(groups)), join_store(HOST, port, RESULT_TIMEOUT_S))  # one for each group
        sizes = (rank, world, max_tokens, hidden_size, dtype, "cpu")
        if hosts is None:
            return TorchDistributed(*sizes, store=store, host=HOST, timeout_s=timeout_s, check_peers=check_peers)
        way = Way("auto", hosts[rank])
        return join_ranks(*sizes, store=store, host=HOST, timeout_s=timeout_s, check_peers=check_peers, way=way)

    try:
        out.send((True, task(join, *arguments)))
    except Exception:  # noqa: BLE001  told to the test, whatever it is
        out.send((False, traceback.format_exc()))
    out.close()
