# SPDX-License-Identifier: MIT OR Apache-2.0
"""The control groups that this process is in (cgroups(7)), and reading the small files that describe a system.

Rules. A file that cannot be read has no lines: systems differ in which they have. The folder of the system's files is
an argument, so that tests can bring another machine. Leaves out: what the files of a group mean.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def groups(controller: str, root: Path = ROOT) -> list[Path]:
    """The folders of this process's group and of those around it, for either version of control groups.

    A container may see its own group as the top: the path that /proc names is then not there, and the top counts.
    """
    folders: list[Path] = []
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controllers and controller)
        inner = top / path.lstrip("/")
        folders += [inner, *(parent for parent in inner.parents if parent.is_relative_to(top))]
    return folders


def lines(file: Path) -> list[str]:
    """The file's lines; none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def first_line(file: Path) -> str:
    """The file's first line; empty where there is none."""
    return next(iter(lines(file)), "").strip()
