# SPDX-License-Identifier: MIT OR Apache-2.0
"""What this process holds: memory, descriptors."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """The memory that this process has in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def num_descriptors() -> int:
    """Open files, sockets and pipes."""
    return len(os.listdir("/proc/self/fd"))
