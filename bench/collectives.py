# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a sum between the ranks of one host costs: through shared memory and through gloo, pinned to cores and not.

    python -m bench.collectives [--ranks 2] [--reps 300]

One table: microseconds on rank 0, median and 95th percentile, of what a layer does in each step, `payload` and
`all_reduce`, for payloads of bf16 as of so many tokens of hidden size 1024. `sum alone` is shared memory without what
Python does around it. The ranks come to each sum together, after a short one that is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from bench.results import write_results
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.rendezvous import Way, join_ranks
from metrale_ray.model.torch_distributed import host_store, join_store
from metrale_ray.native.library import library, why_not

HOST = "127.0.0.1"
HIDDEN = 1024
TOKENS = (2, 8, 32, 128, 512, 2048)  # 4 KiB to 4 MiB
LARGE = 128  # from here on, a tenth of the repetitions
TIMEOUT_S = 120.0
WAYS = ("auto", "gloo")


@dataclass(frozen=True)
class Cost:
    """Microseconds of one kind of sum."""

    median_us: float
    late_us: float

    def __str__(self) -> str:
        return f"{self.median_us:.1f} / {self.late_us:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reps", type=int, default=300)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks is {args.ranks}; a sum needs two ranks at least")
    if library() is None:
        parser.error(f"there is no native core to share memory with: {why_not()}")
    cores = sorted(os.sched_getaffinity(0))
    print(f"{args.ranks} ranks, {len(cores)} cores; µs, median / 95th percentile\n")
    print("| cores | KiB | shared memory | sum alone | gloo |\n|---|---|---|---|---|")
    _print_table("pinned", cores[: args.ranks] if args.ranks <= len(cores) else None, args)
    _print_table("not pinned", (), args)


def _print_table(name: str, pins: Sequence[int] | None, args: argparse.Namespace) -> None:
    if pins is None:
        print(f"| {name} | | not measured: fewer cores than ranks | | |")
        return
    shared, gloo = (_measure(way, pins, args.ranks, args.reps) for way in WAYS)
    write_results("collectives", {num_tokens: whole.median_us for num_tokens, (whole, _) in shared.items()})
    for num_tokens in TOKENS:
        whole, alone = shared[num_tokens]
        print(f"| {name} | {num_tokens * HIDDEN * 2 // 1024} | {whole} | {alone} | {gloo[num_tokens][0]} |")


def _measure(way: str, pins: Sequence[int], num_ranks: int, reps: int) -> dict[int, tuple[Cost, Cost]]:
    """By number of tokens: the whole, and the sum alone."""
    _store, port = host_store(HOST, TIMEOUT_S)  # it lives as long as the ranks
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank, args=(rank, num_ranks, port, way, pins, reps, theirs), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        found: dict[int, tuple[Cost, Cost]] = ours.recv()
    finally:
        for process in ranks:
            process.join(TIMEOUT_S)
    return found


def _rank(rank: int, num_ranks: int, port: int, way: str, pins: Sequence[int], reps: int, results: Connection) -> None:
    torch.set_num_threads(1)
    if pins:
        os.sched_setaffinity(0, {pins[rank]})
    store = dist.PrefixStore("bench", join_store(HOST, port, TIMEOUT_S))
    limits: dict[str, Any] = {"timeout_s": TIMEOUT_S, "check_peers": lambda: None}
    sizes = (rank, num_ranks, max(TOKENS), HIDDEN, torch.bfloat16, "cpu")
    here = Way(way, Way.here({}).host)
    collectives = join_ranks(*sizes, store=store, host=HOST, way=here, **limits)
    found = {}
    for num_tokens in TOKENS:
        collectives.begin(num_tokens, 1)
        count = reps if num_tokens < LARGE else max(10, reps // 10)
        found[num_tokens] = (_time(collectives, _whole, count), _time(collectives, _alone, count))
    if rank == 0:
        results.send(found)
    collectives.close()


def _whole(collectives: Collectives) -> None:
    collectives.payload()
    collectives.all_reduce()


def _alone(collectives: Collectives) -> None:
    collectives._sum(collectives._flat)


def _time(collectives: Collectives, work: Callable[[Collectives], None], count: int) -> Cost:
    one = collectives._flat[:1]
    took_us = []
    for _ in range(count):
        collectives._sum(one)  # all come together
        started = time.perf_counter()
        work(collectives)
        took_us.append((time.perf_counter() - started) * 1e6)
    took_us.sort()
    return Cost(took_us[count // 2], took_us[count * 95 // 100])


if __name__ == "__main__":
    main()
