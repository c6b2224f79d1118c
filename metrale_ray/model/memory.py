# SPDX-License-Identifier: MIT OR Apache-2.0
"""How much memory this process can still get: the machine's, or what its control groups leave it if that is less.

File pages that nobody has used for a while count as free, as they do in the machine's own MemAvailable: reading a
checkpoint fills a group with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from metrale_ray.control_groups import ROOT, first_line, groups, lines

NO_LIMIT = 2**60  # version 1 writes "no limit" as a number near 2**63
# Limit, use, and the entry of memory.stat that counts old file pages, of versions 2 and 1.
NAMES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """`available_bytes` can still be had, `limit_bytes` is the smallest limit of a group; None: not known, no limit."""

    available_bytes: int | None
    limit_bytes: int | None


def memory(root: Path = ROOT) -> Memory:
    """What there is for this process."""
    limits = [limit for folder in groups("memory", root) for limit in _limits(folder)]
    left = [*_of_machine(root), *(free for _, free in limits)]
    return Memory(
        available_bytes=min(left, default=None), limit_bytes=min((limit for limit, _ in limits), default=None)
    )


def _of_machine(root: Path) -> Iterator[int]:
    for line in lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _limits(folder: Path) -> Iterator[tuple[int, int]]:
    """The group's limit and what is left of it."""
    for limit_name, used_name, old_pages_name in NAMES:
        limit, used = first_line(folder / limit_name), first_line(folder / used_name)
        if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
            in_use = max(0, int(used) - _entry(folder / "memory.stat", old_pages_name))
            yield int(limit), max(0, int(limit) - in_use)


def _entry(file: Path, name: str) -> int:
    """A number of a file of names and numbers; 0 where it is not there."""
    found = (line.split() for line in lines(file))
    return next((int(words[1]) for words in found if len(words) == 2 and words[0] == name), 0)
