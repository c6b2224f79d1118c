# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line's first moments, as a process: an interrupt before the commands are there is no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metrale_ray import __version__

TOP = Path(__file__).resolve().parent.parent
# The import of the commands stops at a module that waits, as a slow disk would make it.
SLOW_IMPORT = """
import importlib.abc, signal, sys, threading
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "metrale_ray.cli":
            print("importing", flush=True)
            threading.Event().wait(60)
sys.meta_path.insert(0, Slow())
from metrale_ray.__main__ import main
main()
"""
IGNORES = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    return process


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_during_the_first_imports_is_one_word(number: signal.Signals, code: int, word: str) -> None:
    process = start(SLOW_IMPORT)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, f"{word}\n")


def test_a_process_that_ignores_interrupts_keeps_ignoring_them() -> None:
    process = start(IGNORES + SLOW_IMPORT)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "terminated\n")


def test_the_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "metrale_ray", "--version"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"metrale-ray {__version__}\n"
