# SPDX-License-Identifier: MIT OR Apache-2.0
"""The memory that a process can get, on made-up machines: nested control groups of both versions, containers, none."""

from __future__ import annotations

from pathlib import Path

import pytest

from metrale_ray.control_groups import groups
from metrale_ray.model.memory import Memory, memory

MIB = 2**20
MEMINFO = {"proc/meminfo": "MemTotal: 1 kB\nMemAvailable:   204800 kB\n"}
V2 = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/memory.max": f"{100 * MIB}\n",
    "sys/fs/cgroup/a/memory.current": f"{60 * MIB}\n",
    "sys/fs/cgroup/a/b/memory.max": "max\n",
    "sys/fs/cgroup/a/b/memory.current": "0\n",
}
V1 = {
    "proc/self/cgroup": "9:pids:/\n4:memory,hugetlb:/a\n1:cpu:/a\n0::/\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{100 * MIB}\n",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{60 * MIB}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
}
CONTAINER = {  # its own group is the top, and /proc names it as the host does
    "proc/self/cgroup": "0::/docker/c0ffee\n",
    "sys/fs/cgroup/memory.max": f"{100 * MIB}\n",
    "sys/fs/cgroup/memory.current": f"{60 * MIB}\n",
}


def machine(root: Path, files: dict[str, str]) -> Path:
    """A machine's files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize("files", [V2, V1, CONTAINER], ids=["version 2", "version 1", "container"])
def test_what_the_groups_leave_counts_where_it_is_less_than_the_machines(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory(machine(tmp_path, files)) == Memory(40 * MIB, 100 * MIB)
    assert memory(machine(tmp_path, MEMINFO)) == Memory(40 * MIB, 100 * MIB)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    assert memory(tmp_path) == Memory(1 * MIB, 100 * MIB)


@pytest.mark.parametrize(
    ("files", "stat", "entry"),
    [
        (V2, "sys/fs/cgroup/a/memory.stat", "inactive_file"),
        (V1, "sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file"),
    ],
)
def test_old_file_pages_of_a_group_are_no_use_of_its_memory(
    tmp_path: Path, files: dict[str, str], stat: str, entry: str
) -> None:
    root = machine(tmp_path, {**files, stat: f"anon 5\n{entry} {50 * MIB}\nodd\n"})
    assert memory(root) == Memory(90 * MIB, 100 * MIB)


def test_without_groups_it_is_the_machines_and_without_anything_it_is_not_known(tmp_path: Path) -> None:
    assert memory(tmp_path) == Memory(None, None)
    assert memory(machine(tmp_path, MEMINFO)) == Memory(200 * MIB, None)


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "200\n",
    }
    assert memory(machine(tmp_path, files)).available_bytes == 0


def test_a_list_of_groups_that_is_damaged_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/self/cgroup": "odd\n0::/a\n"})
    assert groups("memory", root)[-2:] == [root / "sys/fs/cgroup/a", root / "sys/fs/cgroup"]
    (root / "proc/self/cgroup").write_bytes(b"0::/\xff\n")
    assert groups("memory", root) == []


def test_this_machine_is_known() -> None:
    available = memory().available_bytes
    assert available is not None
    assert 0 < available < 2**50
