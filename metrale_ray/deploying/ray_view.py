# SPDX-License-Identifier: MIT OR Apache-2.0
"""A look at a Ray cluster that comes up: who is alive, and what the autoscaler has left for whoever asks.

Rules. Ray is joined, never started. The autoscaler's logs, and its notes on machines of one's own, are files on the
head: elsewhere, and before they are there, nothing is known of them, and that is no error. Of long logs the end is
read.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray._private.services import get_ray_address_from_environment
from ray.experimental.internal_kv import _internal_kv_get

from metrale_ray.cluster.session import RaySession
from metrale_ray.deploying.expected import ExpectedNodes
from metrale_ray.deploying.monitor_log import MonitorLog, is_address, read_monitor
from metrale_ray.deploying.waiting import Sight
from metrale_ray.errors import StartError
from metrale_ray.reach import why_silent

LOG_BYTES = 4 << 20
STATUS_KEY, ERROR_KEY = "__autoscaling_status", "__autoscaling_error"  # in Ray's own store
STATUS_TAG = "ray-node-status"
MONITOR_SILENT_S = 30.0  # it reports each few seconds
MONITOR_LOGS = ("monitor.log", "monitor.out", "monitor.err")


class RayView:
    """The Ray at `address`. Use it in a `with` statement. Raises StartError when it cannot be reached."""

    def __init__(self, address: str, expected: ExpectedNodes) -> None:
        self._address = self._found = address
        self._expected = expected
        self._session = RaySession()

    def __enter__(self) -> RayView:
        self._found = _found(self._address)
        _check_reached(self._found)
        self._session.join(self._address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.leave()

    def look(self) -> Sight:
        """What is to be seen now. Raises StartError when Ray has ended."""
        _check_reached(self._found)
        nodes = [(str(node["NodeManagerAddress"]), node) for node in ray.nodes()]
        alive = frozenset(address for address, node in nodes if node["Alive"])
        addresses = {name: resolved(name) for name in self._expected.names}
        status = _internal_kv_get(STATUS_KEY)
        told = autoscaler_states(status)
        noted = noted_states(_state_file(self._expected.cluster_name))
        error = _internal_kv_get(ERROR_KEY)
        folder = _logs_folder()
        has_ended = lost_monitor(status) if (folder / MONITOR_LOGS[0]).exists() else None
        return Sight(
            alive=alive,
            states={**told, **noted},
            monitor=monitor_logs(folder, addresses),
            autoscaler_error=has_ended if error is None else error.decode(errors="replace"),
            addresses=addresses,
            gone={address: str(node.get("DeathReasonMessage") or "") for address, node in nodes if not node["Alive"]},
        )


def _found(address: str) -> str:
    """The address that Ray takes for `address`. Raises StartError where there is none."""
    try:
        return str(get_ray_address_from_environment(address, None))
    except ConnectionError as error:
        raise StartError(f"cannot reach Ray at {address!r}: {error}") from error


def _check_reached(address: str) -> None:
    """Ray itself would try for minutes, and then end the process. Raises StartError when nobody listens there."""
    why = why_silent(address)
    if why is not None:
        raise StartError(f"cannot reach Ray at {address!r}: {why}")


def autoscaler_states(status: bytes | None) -> dict[str, str]:
    """By address, the state of nodes on their way, out of the older autoscaler's report."""
    report = json.loads(status or b"{}").get("autoscaler_report") or {}
    return {str(address): str(state) for address, _, state in report.get("pending_nodes", ())}


def lost_monitor(status: bytes | None) -> str | None:
    """What to say of an autoscaler that ended without a word, as one that is killed does. For the head alone."""
    told = json.loads(status or b"{}")
    pid, told_s = told.get("monitor_pid"), told.get("time")
    if pid is None or told_s is None or time.time() - told_s < MONITOR_SILENT_S or Path(f"/proc/{pid}").exists():
        return None
    return f"its process, {pid} on the head, has gone; monitor.log among Ray's logs there may say why"


def noted_states(file: Path | None) -> dict[str, str]:
    """By name, the state of one's own machines, out of the autoscaler's notes on the head.

    A machine that is none of the cluster's now is left out, as is the head, which keeps the notes.
    """
    try:
        notes: Mapping[str, Any] = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is not the head, or the file is being written
        return {}
    return {
        name: node["tags"][STATUS_TAG]
        for name, node in notes.items()
        if node.get("state") == "running" and STATUS_TAG in node.get("tags", {})
    }


def monitor_logs(folder: Path, addresses: Mapping[str, str]) -> MonitorLog:
    """What the autoscaler's logs in `folder` say."""
    log, out, err = (_end_of(folder / name) for name in MONITOR_LOGS)
    return read_monitor(log, out, err, addresses)


def resolved(name: str) -> str:
    """The address of a machine; its name where nobody knows it."""
    if is_address(name):
        return name
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def _end_of(file: Path) -> str:
    """The last lines, whole ones."""
    try:
        with file.open("rb") as opened:
            start = file.stat().st_size - LOG_BYTES - 1  # one before, which tells whether a line begins there
            opened.seek(max(0, start))
            text = opened.read()
    except OSError:  # it is not the head, or nothing was written yet
        return ""
    first = text.find(b"\n") + 1 if start >= 0 else 0
    return text[first : text.rfind(b"\n") + 1].decode(errors="replace")


def _logs_folder() -> Path:
    """Of the node that this process has joined."""
    return Path(ray._private.worker.global_worker.node.get_logs_dir_path())


def _state_file(cluster_name: str | None) -> Path | None:
    """Where Ray keeps its notes on machines of one's own."""
    if cluster_name is None:
        return None
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / f"cluster-{cluster_name}.state"
