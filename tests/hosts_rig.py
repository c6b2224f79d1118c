# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ray on two hosts, with a token, and a driver that runs on one of them.

Ray's own doors are all in RAYS_PORTS, so that a socket tells by its port whose it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.namespaces import Host

ROOT = Path(__file__).parents[1]
RAYS_PORTS = range(10000, 20000)
RAY_PORT = 10000
NODE_OPTIONS = (
    "--block",
    "--num-cpus=2",
    "--object-store-memory=100000000",
    "--disable-usage-stats",
    "--node-manager-port=10008",  # 10001 is where Ray's server of clients listens by itself
    "--object-manager-port=10002",
    "--runtime-env-agent-port=10003",
    "--dashboard-agent-listen-port=10004",
    "--dashboard-agent-grpc-port=10005",
    "--metrics-export-port=10006",
    "--min-worker-port=10100",
    "--max-worker-port=10199",
)
# Ray gives a node up after this many answers that it missed; the tests' cuts are shorter.
PATIENCE = {"RAY_health_check_failure_threshold": "100"}
STARTED = "Ray runtime started"
START_S = 60.0
ANSWER_S = 90.0


class RayNodes:
    """A Ray whose head is on the first host and whose other node is on the second. Use it in a `with` statement."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path) -> None:
        token = folder / "token"
        token.write_text(uuid.uuid4().hex)
        entry = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self.environment = {**os.environ, **entry, **PATIENCE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.address = f"{hosts[0].address}:{RAY_PORT}"
        self._hosts = hosts
        self._folder = folder
        self._nodes: list[_Node] = []
        self._temporary: list[Path] = []

    def __enter__(self) -> RayNodes:
        first, second = self._hosts
        try:
            self._start(first, "--head", f"--port={RAY_PORT}", "--include-dashboard=false")
            self._start(second, f"--address={self.address}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self._nodes:
            node.end()
        for folder in self._temporary:
            shutil.rmtree(folder, ignore_errors=True)

    def driver(self, host: Host, name: str) -> HostsDriver:
        """A driver on a host. `name` is that of its log."""
        return HostsDriver(host, self.address, self.environment, self._folder / f"{name}.log")

    def _start(self, host: Host, *options: str) -> None:
        """Start one node and wait until it runs."""
        log = self._folder / f"{host.namespace}.log"
        temporary = Path(f"/tmp/mr-{uuid.uuid4().hex[:6]}")  # short: the names of local sockets have a limit
        self._temporary.append(temporary)
        command = [str(Path(sys.executable).with_name("ray")), "start", *NODE_OPTIONS, *options]
        command += [f"--node-ip-address={host.address}", f"--temp-dir={temporary}"]
        node = _Node(host.command(*command), self.environment, log)
        self._nodes.append(node)
        assert until(lambda: node.has_ended or STARTED in node.text, START_S), node.text
        assert not node.has_ended, node.text


class _Node:
    """`ray start` as it runs."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    @property
    def text(self) -> str:
        """What it has written."""
        return self._log.read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """End it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class HostsDriver:
    """`tests.hosts_driver` on a host, with its answers in order. Use it in a `with` statement."""

    def __init__(self, host: Host, address: str, environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                host.command(sys.executable, "-m", "tests.hosts_driver", address),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> HostsDriver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give an order and wait for its answer."""
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The next answer."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"the driver said nothing for {timeout_s} s: {self._log.read_text()}") from None
        assert line, f"the driver has ended: {self._log.read_text()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def leave(self, timeout_s: float) -> int:
        """Say that no more orders come, and give the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout_s)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")  # the end


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for `condition`; False when it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.1)
    return True
