# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a rank's process ends, whatever it is doing: `die_with_parent`, `die_at_sigterm`.

A rank notices by itself that its Ray has gone, unless it is stopped: a stopped process runs nothing. And a rank in the
middle of a step or a load would take SIGTERM for a wish to end later. The kernel ends it all the same, if it was told
to before. A rank has nothing to save: the others see its connections end, at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel to kill this process at its parent's death. Raises OSError; does nothing outside Linux."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def die_at_sigterm() -> None:
    """Let SIGTERM end this process at once, whoever had a handler for it. Unlike Python's way, from any thread."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGTERM, None)  # SIG_DFL is the null pointer
