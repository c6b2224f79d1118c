# SPDX-License-Identifier: MIT OR Apache-2.0
"""`die_with_parent`: a rank's process ends when the process that started it does, even if it is stopped just then.

A rank notices by itself that its Ray has gone, unless it is stopped: a stopped process runs nothing. The kernel can
end it all the same, if it was told to before.
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
