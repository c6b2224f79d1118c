# SPDX-License-Identifier: MIT OR Apache-2.0
"""Processes that tests start and watch: runs of a command with a mark, a Ray of its own, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

TIMEOUT_S = 200.0
LEFT_S = 15.0  # so long after its end, nothing of an engine may be left
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # these leave by themselves, later


class Run:
    """One run of a command; every process that comes from it carries a mark in its environment."""

    def __init__(self, argv: Sequence[str], **environment: str) -> None:
        self.mark = f"METRALE-RUN-{uuid.uuid4().hex}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by wait()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "RUN_MARK": self.mark, **environment},
            start_new_session=True,  # a signal to it is not one to the tests
        )

    def wait(self, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Its end, with what it wrote. It is killed when it takes too long, and that is an error."""
        try:
            out, _ = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
        done = subprocess.CompletedProcess(self.process.args, self.process.returncode, out, self.errors())
        self._errors.close()
        return done

    def errors(self) -> str:
        """What it has written to standard error so far."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode()

    def left(self) -> dict[int, str]:
        """The processes that came from this run and still are there."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    name = (folder / "cmdline").read_text().replace("\0", " ")[:80]
                    if self.mark.encode() in (folder / "environ").read_bytes() and not name.startswith(RAYS_OWN):
                        found[int(folder.name)] = name
                except OSError:
                    continue  # it ended meanwhile, or is not ours
        return found


class OwnRay:
    """A Ray of one node that was started on its own, with a token; `entry` is the environment that lets one in."""

    def __init__(self, folder: Path, num_cpus: int = 4) -> None:
        token = folder / "token"
        token.write_text(uuid.uuid4().hex)
        self.entry = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._log_path = folder / "ray.log"
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--head", "--block", f"--num-cpus={num_cpus}", "--port=0"]
        command += [
            "--include-dashboard=false",
            f"--temp-dir=/tmp/mr-{uuid.uuid4().hex[:6]}",
        ]  # sockets have short names
        self._log = self._log_path.open("w+")
        self._head = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env={**os.environ, **self.entry}, start_new_session=True
        )

    def __enter__(self) -> OwnRay:
        if not until(lambda: bool(self.address) or self._head.poll() is not None, 60) or not self.address:
            self.__exit__()
            raise AssertionError(f"Ray did not start: {self._log_path.read_text()}")
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._head.pid, signal.SIGKILL)
        self._head.wait()
        self._log.close()

    @property
    def address(self) -> str:
        """Where drivers reach it; empty until it is up."""
        text = self._log_path.read_text()
        return text.split("--address='", 1)[1].split("'", 1)[0] if "--address='" in text else ""


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.1)
    return True


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not just ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def check_nothing_left(run: Run) -> None:
    """Every process that came from the run has gone, or goes in time."""
    assert until(lambda: not run.left(), LEFT_S), run.left()
