# SPDX-License-Identifier: MIT OR Apache-2.0
"""What this process holds: memory and descriptors."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path


def resident_bytes() -> int:
    """This process's own memory in RAM, without files, and without what the C library keeps to give it out again."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def num_descriptors() -> int:
    """Open files, sockets and pipes."""
    return len(os.listdir("/proc/self/fd"))
