# SPDX-License-Identifier: MIT OR Apache-2.0
"""A process that has asked for it ends with its parent, also while it is stopped, and at SIGTERM whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CHILD = "from metrale_ray.process_end import die_with_parent as d; d(); print('ready', flush=True); input()"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


def test_a_stopped_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "the stopped child is still there"
        threading.Event().wait(0.01)


def test_sigterm_ends_a_process_that_has_a_handler_and_does_not_come_back_to_it() -> None:
    code = """
import ctypes, signal, threading
from metrale_ray.process_end import die_at_sigterm
signal.signal(signal.SIGTERM, lambda number, frame: None)
other = threading.Thread(target=die_at_sigterm)
other.start()
other.join()
print("ready", flush=True)
ctypes.CDLL(None).pause()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
    process.stdout.close()


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
