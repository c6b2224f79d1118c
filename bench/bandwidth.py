# SPDX-License-Identifier: MIT OR Apache-2.0
"""How fast this machine's cores read memory: one alone, all at once in processes of their own, all as one process.

    python -m bench.bandwidth [--reps 7]

Each process is pinned, and reads 512 MiB of huge pages, which are far more than the caches hold, by summing them. The
bound of one rank is over what all cores read together, whichever way is the faster; that of R ranks over a rank's
share of what all processes read at once.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.results import write_results

BYTES = 2**29
WARM_UP = 2
WAIT_S = 120.0


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second: medians. `one_core` alone, `processes` pinned to one core each and `threads` of one process
    together."""

    one_core: float
    processes: float
    threads: float

    @property
    def all_cores(self) -> float:
        """The most that the cores read together."""
        return max(self.processes, self.threads, self.one_core)

    def of_rank(self, ranks: int) -> float:
        """What one of so many ranks reads, with its share of the cores, while all read."""
        return self.all_cores if ranks == 1 else self.processes / ranks


def measure(reps: int = 7) -> Bandwidth:
    """Takes some seconds."""
    cores = sorted(os.sched_getaffinity(0))
    one = _in_processes([cores[:1]], reps)
    several = _in_processes([[core] for core in cores], reps)
    return Bandwidth(one, several, _in_processes([cores], reps))


def _in_processes(groups: list[list[int]], reps: int) -> float:
    """Bytes per second of one process on each group of cores, all at once; the median."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(len(groups)), context.Queue()
    readers = [context.Process(target=_read, args=(cores, reps, barrier, times)) for cores in groups]
    for reader in readers:
        reader.start()
    seconds = [times.get(timeout=WAIT_S) for _ in readers]
    for reader in readers:
        reader.join()
    # They begin each read together; it is over when the slowest has done its part.
    return statistics.median(len(groups) * BYTES / max(each) for each in zip(*seconds, strict=True))


def _read(cores: list[int], reps: int, barrier: Any, times: Any) -> None:
    os.sched_setaffinity(0, cores)
    import torch  # after that, so that its threads stay on these cores

    torch.set_num_threads(len(cores))
    memory = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(memory, dtype=torch.float32)
    values.fill_(1.0)
    seconds = []
    for _ in range(WARM_UP + reps):
        barrier.wait(WAIT_S)
        began_s = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began_s)
    times.put(seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=7)
    found = measure(parser.parse_args().reps)
    print("| read by | GB/s |\n|---|---|")
    print(f"| one core | {found.one_core / 1e9:.1f} |")
    print(f"| all cores, a process each | {found.processes / 1e9:.1f} |")
    print(f"| all cores, one process | {found.threads / 1e9:.1f} |")
    write_results("bandwidth", asdict(found))


if __name__ == "__main__":
    main()
