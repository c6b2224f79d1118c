# SPDX-License-Identifier: MIT OR Apache-2.0
"""`forget_start`: what a process has made until it is ready, libraries above all, is there for good.

Python's collector looks at everything in each of its full rounds: half a second for the libraries of a rank or a front,
in the middle of some step. What is frozen it passes over.
"""

from __future__ import annotations

import gc


def forget_start() -> None:
    """Collect once, and let the collector pass over what is left from now on. For a process that has become ready."""
    gc.collect()
    gc.freeze()
