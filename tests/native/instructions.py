# SPDX-License-Identifier: MIT OR Apache-2.0
"""The instruction sets whose kernels this process can run, one of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch  # noqa: F401  its OpenMP is there when the core is loaded
from hypothesis import settings

from metrale_ray.native import library

ALL = ("generic", "avx2", "avx512", "amx", "wide")
# Sets that multiply many rows by tiles: a row's last bits differ between few rows and many.
TILED = ("amx", "wide")
MIN_TILE_ROWS = 16

needs_core = pytest.mark.skipif(library.library() is None, reason=library.why_not())


def available() -> list[str]:
    """Those that were built and that this processor has; empty without a core."""
    core = library.library()
    if core is None:
        return []
    with running(library.instructions()):
        return [name for name in ALL if core.mr_use_instructions(name.encode()) == 0]


@contextmanager
def running(name: str) -> Iterator[None]:
    """Its kernels run until the end of the block."""
    core = library.library()
    assert core is not None
    before = library.instructions()
    assert core.mr_use_instructions(name.encode()) == 0, f"{name} does not run here"
    try:
        yield
    finally:
        core.mr_use_instructions(before.encode())


# Each property is tried with every set, so a share of the examples is enough for one.
fewer_examples = settings(max_examples=max(settings().max_examples // 5, 1))
on_each_set = pytest.mark.parametrize("instructions", available())
