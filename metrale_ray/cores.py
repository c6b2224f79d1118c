# SPDX-License-Identifier: MIT OR Apache-2.0
"""The CPUs of this machine that a process may use, how they form cores and NUMA nodes, and which to take of them.

Words: a CPU is what the kernel schedules on, and has a number. A core is one CPU, or two and more that are its
hyperthreads and share its arithmetic. A NUMA node is cores with memory of their own.

Rules. What limits a process counts: its affinity mask, and the quota of its control groups. Whoever takes CPUs takes
one of each core, and all from one node, as long as there are enough; second hyperthreads come last. The folder of the
system's files is an argument, so that tests can bring another machine; where the files do not tell, every CPU is a core
of node 0.

What it leaves out: who has taken which (`core_claims`), and cores of unlike speed, which count alike.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from metrale_ray.control_groups import ROOT, first_line, groups

CPUS = "sys/devices/system/cpu"
# Newer and older kernels' names of the same list.
SIBLINGS = ("core_cpus_list", "thread_siblings_list")


@dataclass(frozen=True, slots=True)
class Cpu:
    """One CPU. `core` is the lowest number among the CPUs of its core, `node` the number of its NUMA node."""

    number: int
    core: int
    node: int


@dataclass(frozen=True, slots=True)
class Usable:
    """What a process may use at once: so many CPUs' worth of time, which may be a fraction, on so many whole cores."""

    num_cpus: float
    num_cores: int


def usable(root: Path = ROOT, allowed: Collection[int] | None = None) -> Usable:
    """Of this machine, within the process's mask and quota. `allowed` stands for the mask; at least one core."""
    found = cpus(allowed_cpus() if allowed is None else allowed, root)
    limit = quota(root)
    num_cpus = float(len(found)) if limit is None else min(len(found), limit)
    return Usable(num_cpus, max(1, min(len({cpu.core for cpu in found}), int(num_cpus))))


def allowed_cpus() -> frozenset[int]:
    """The numbers of the CPUs in the mask of the thread that asks; all of them where the system has no masks."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that this process's control groups allow it, the least of them; None for no limit."""
    return min((limit for folder in groups("cpu", root) for limit in _limits(folder)), default=None)


def _limits(folder: Path) -> Iterator[float]:
    """The limit of one control group, of either version, where it has one."""
    parts = first_line(folder / "cpu.max").split()
    if not parts:
        parts = [first_line(folder / "cpu.cfs_quota_us"), first_line(folder / "cpu.cfs_period_us")]
    if len(parts) == 2 and all(part.isdigit() for part in parts) and int(parts[1]) > 0:  # else "max", or -1
        yield int(parts[0]) / int(parts[1])


def cpus(numbers: Iterable[int], root: Path = ROOT) -> list[Cpu]:
    """The CPUs of these numbers, in their order."""
    return [Cpu(number, _core(number, root), _node(number, root)) for number in sorted(numbers)]


def _core(number: int, root: Path) -> int:
    for name in SIBLINGS:
        listed = parse_list(first_line(root / CPUS / f"cpu{number}/topology" / name))
        if number in listed:
            return min(listed)
    return number


def _node(number: int, root: Path) -> int:
    names = [link.name.removeprefix("node") for link in (root / CPUS / f"cpu{number}").glob("node*")]
    return min((int(name) for name in names if name.isdigit()), default=0)


def parse_list(text: str) -> frozenset[int]:
    """The numbers in the kernel's way of writing them, such as "0-3,8"; none where it is another text."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return frozenset()
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def written_list(numbers: Iterable[int]) -> str:
    """The numbers in the kernel's way of writing them: the text that `parse_list` reads."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def choose(among: Sequence[Cpu], taken: Collection[int], num_cpus: int) -> list[int] | None:
    """The numbers of `num_cpus` of these CPUs that are not `taken`; None where there are too few.

    One CPU of each core of which nothing is taken, all on the node that then has the least left over, else on as few
    nodes as can be. Only where such cores are too few: all of them, then their other hyperthreads, then those of cores
    of which something is taken.
    """
    firsts = _first_of_each_whole_core(among, taken)
    if len(firsts) >= num_cpus:
        return sorted(_on_few_nodes(firsts, num_cpus))
    numbers, own_cores = {cpu.number for cpu in firsts}, {cpu.core for cpu in firsts}
    others = [cpu for cpu in among if cpu.number not in numbers and cpu.number not in taken]
    others.sort(key=lambda cpu: (cpu.core not in own_cores, cpu.number))
    if len(firsts) + len(others) < num_cpus:
        return None
    return sorted([*numbers, *(cpu.number for cpu in others[: num_cpus - len(firsts)])])


def _first_of_each_whole_core(among: Sequence[Cpu], taken: Collection[int]) -> list[Cpu]:
    broken = {cpu.core for cpu in among if cpu.number in taken}
    firsts: dict[int, Cpu] = {}
    for cpu in sorted(among, key=lambda cpu: cpu.number):
        if cpu.core not in broken:
            firsts.setdefault(cpu.core, cpu)
    return list(firsts.values())


def _on_few_nodes(firsts: Sequence[Cpu], num_cpus: int) -> list[int]:
    """`num_cpus` of `firsts`, which are as many or more."""
    left = Counter(cpu.node for cpu in firsts)
    chosen: list[int] = []
    while len(chosen) < num_cpus:
        wanted = num_cpus - len(chosen)
        enough = [node for node in left if left[node] >= wanted]
        node = min(enough, key=lambda n: (left[n], n)) if enough else max(left, key=lambda n: (left[n], -n))
        chosen += [cpu.number for cpu in firsts if cpu.node == node][:wanted]
        del left[node]
    return chosen
