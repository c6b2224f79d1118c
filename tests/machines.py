# SPDX-License-Identifier: MIT OR Apache-2.0
"""Made-up machines: the files in which Linux tells of its cores, written into a folder that stands for the root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """All nodes alike. First threads have the low numbers, node after node, then second ones, as on most machines."""

    num_nodes: int
    cores_per_node: int
    threads_per_core: int

    def write(self, root: Path, *, cpu_max: str | None = None) -> Path:
        """Write its files under `root`, with a quota of this process's control group where `cpu_max` is one."""
        num_cores = self.num_nodes * self.cores_per_node
        for core in range(num_cores):
            siblings = list(range(core, num_cores * self.threads_per_core, num_cores))
            for number in siblings:
                folder = root / f"sys/devices/system/cpu/cpu{number}"
                (folder / "topology").mkdir(parents=True)
                (folder / "topology/core_cpus_list").write_text(",".join(map(str, siblings)) + "\n")
                (folder / f"node{core // self.cores_per_node}").mkdir()
        for name, text in _groups(cpu_max):
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return root


def _groups(cpu_max: str | None) -> Iterator[tuple[str, str]]:
    yield "proc/sys/kernel/random/boot_id", "0123abcd-4567-89ef-0123-456789abcdef"
    if cpu_max is not None:
        yield "proc/self/cgroup", "0::/a"
        yield "sys/fs/cgroup/a/cpu.max", cpu_max
