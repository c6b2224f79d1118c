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
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_get

from metrale_ray.cluster.session import RaySession
from metrale_ray.deploying.expected import ExpectedNodes
from metrale_ray.deploying.monitor_log import MonitorLog, is_address, read_monitor
from metrale_ray.deploying.waiting import Sight

LOG_BYTES = 4 << 20
STATUS_KEY, ERROR_KEY = "__autoscaling_status", "__autoscaling_error"  # in Ray's own store
STATUS_TAG = "ray-node-status"
MONITOR_LOGS = ("monitor.log", "monitor.out", "monitor.err")


class RayView:
    """The Ray at `address`. Use it in a `with` statement. Raises StartError when it cannot be reached."""

    def __init__(self, address: str, expected: ExpectedNodes) -> None:
        self._address = address
        self._expected = expected
        self._session = RaySession()

    def __enter__(self) -> RayView:
        self._session.join(self._address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.leave()

    def look(self) -> Sight:
        """What is to be seen now."""
        alive = frozenset(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
        addresses = {name: resolved(name) for name in self._expected.names}
        told = autoscaler_states(_internal_kv_get(STATUS_KEY))
        noted = noted_states(_state_file(self._expected.cluster_name))
        error = _internal_kv_get(ERROR_KEY)
        return Sight(
            alive=alive,
            states={**told, **noted},
            monitor=monitor_logs(_logs_folder(), addresses),
            autoscaler_error=None if error is None else error.decode(errors="replace"),
            addresses=addresses,
        )


def autoscaler_states(status: bytes | None) -> dict[str, str]:
    """By address, the state of nodes on their way, out of the older autoscaler's report."""
    report = json.loads(status or b"{}").get("autoscaler_report") or {}
    return {str(address): str(state) for address, _, state in report.get("pending_nodes", ())}


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
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - LOG_BYTES))
            return opened.read().decode(errors="replace")
    except OSError:  # it is not the head, or nothing was written yet
        return ""


def _logs_folder() -> Path:
    """Of the node that this process has joined."""
    return Path(ray._private.worker.global_worker.node.get_logs_dir_path())


def _state_file(cluster_name: str | None) -> Path | None:
    """Where Ray keeps its notes on machines of one's own."""
    if cluster_name is None:
        return None
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / f"cluster-{cluster_name}.state"
