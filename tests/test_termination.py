# SPDX-License-Identifier: MIT OR Apache-2.0
"""SIGTERM to a command: it interrupts, once; and a clean-up that hangs has an end."""

from __future__ import annotations

import signal
import subprocess
import sys

CODE = """
import time
from metrale_ray import termination
termination.CLEAN_UP_S = {limit_s}
termination.interrupt_at_sigterm()
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("cleaning", termination.was_terminated(), flush=True)
    time.sleep({clean_up_s})
    print("clean", flush=True)
"""


def run(limit_s: float, clean_up_s: float, num_signals: int) -> tuple[int, str, str]:
    code = CODE.format(limit_s=limit_s, clean_up_s=clean_up_s)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        cleaning = process.stdout.readline()
        for _ in range(num_signals - 1):
            process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=30)
    return process.returncode, cleaning + out, errors


def test_a_second_signal_does_not_cut_the_clean_up_short() -> None:
    assert run(limit_s=20, clean_up_s=0.5, num_signals=3) == (0, "cleaning True\nclean\n", "")


def test_a_clean_up_that_hangs_is_cut_short() -> None:
    code, out, errors = run(limit_s=0.2, clean_up_s=60, num_signals=1)
    assert (code, out) == (143, "cleaning True\n")
    assert "before everything was cleaned up" in errors
