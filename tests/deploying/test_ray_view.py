# SPDX-License-Identifier: MIT OR Apache-2.0
"""A look at a cluster that comes up. Ray is played; files are real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metrale_ray.deploying import ray_view
from metrale_ray.deploying.expected import ExpectedNodes
from metrale_ray.deploying.ray_view import (
    RayView,
    autoscaler_states,
    lost_monitor,
    monitor_logs,
    noted_states,
    resolved,
)
from metrale_ray.errors import StartError
from tests.deploying.test_monitor_log import LOGS

STATE = {
    "10.0.0.1": {"tags": {"ray-node-type": "head", "ray-node-status": "up-to-date"}, "state": "running"},
    "10.0.0.2": {"tags": {"ray-node-type": "worker", "ray-node-status": "setting-up"}, "state": "running"},
    "10.0.0.3": {"tags": {"ray-node-type": "worker"}, "state": "terminated"},
    "10.0.0.4": {"tags": {"ray-node-status": "update-failed"}, "state": "terminated"},
}


class PlayedSession:
    """Notes what was joined and left."""

    done: list[str | None]

    def join(self, address: str | None) -> None:
        self.done.append(address)

    def leave(self) -> None:
        self.done.append("left")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    """What Ray's store holds; its logs are under `logs`, its notes in `ray`."""
    store: dict[str, bytes] = {}
    nodes = [
        {"NodeManagerAddress": "10.77.6.1", "Alive": True},
        {"NodeManagerAddress": "10.77.6.2", "Alive": False, "DeathReasonMessage": "it was killed"},
    ]
    node = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path / "logs"))
    worker = SimpleNamespace(worker=SimpleNamespace(global_worker=SimpleNamespace(node=node)))
    monkeypatch.setattr(PlayedSession, "done", [], raising=False)
    monkeypatch.setattr(ray_view, "RaySession", PlayedSession)
    monkeypatch.setattr(
        ray_view, "why_silent", lambda address: "Connection refused" if address.startswith("127.0.0.1") else None
    )
    monkeypatch.setattr(ray_view, "get_ray_address_from_environment", lambda address, _: address)
    monkeypatch.setattr(ray_view, "_internal_kv_get", store.get)
    monkeypatch.setattr(ray_view, "ray", SimpleNamespace(nodes=lambda: nodes, _private=worker))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return store


def test_all_that_is_known_is_one_sight(played: dict[str, bytes], tmp_path: Path) -> None:
    shutil.copytree(LOGS / "setup_failed", tmp_path / "logs")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/cluster-own.state").write_text(json.dumps(STATE))
    played["__autoscaling_status"] = status(["10.0.0.2", "t", "waiting-for-ssh"], ["10.0.0.9", "t", "uninitialized"])
    played["__autoscaling_error"] = b"it \xff died"
    with RayView("auto", ExpectedNodes(("10.77.6.1", "10.77.6.3"), 2, "own")) as view:
        seen = view.look()
    assert PlayedSession.done == ["auto", "left"]
    assert seen.alive == {"10.77.6.1"}
    assert seen.states == {"10.0.0.1": "up-to-date", "10.0.0.2": "setting-up", "10.0.0.9": "uninitialized"}
    assert seen.monitor.nodes["10.77.6.3"].is_given_up
    assert seen.autoscaler_error == "it \ufffd died"
    assert seen.gone == {"10.77.6.2": "it was killed"}
    assert seen.addresses == {"10.77.6.1": "10.77.6.1", "10.77.6.3": "10.77.6.3"}


def test_away_from_the_head_ray_alone_tells(played: dict[str, bytes]) -> None:
    with RayView("10.77.6.1:6379", ExpectedNodes((), 2)) as view:
        seen = view.look()
    assert (seen.alive, seen.states, seen.monitor.nodes) == ({"10.77.6.1"}, {}, {})
    assert seen.autoscaler_error is None


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_a_ray_that_does_not_listen_is_told_at_once(
    played: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_view, "get_ray_address_from_environment", lambda *_: "127.0.0.1:1")
    with pytest.raises(StartError, match=r"cannot reach Ray at '127.0.0.1:1': Connection refused"):
        RayView(address, ExpectedNodes((), 2)).__enter__()
    assert PlayedSession.done == []


def test_a_ray_that_ends_meanwhile_is_told(played: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with RayView("10.77.6.1:6379", ExpectedNodes((), 2)) as view:
        view.look()
        monkeypatch.setattr(ray_view, "why_silent", lambda address: "Connection refused")
        with pytest.raises(StartError, match=r"cannot reach Ray at '10.77.6.1:6379': Connection refused"):
            view.look()
    assert PlayedSession.done == ["10.77.6.1:6379", "left"]


def test_no_ray_on_this_machine_is_told(played: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray_view, "get_ray_address_from_environment", none)
    with pytest.raises(StartError, match=r"cannot reach Ray at 'auto': Could not find any running Ray instance"):
        RayView("auto", ExpectedNodes((), 2)).__enter__()


def test_ray_is_left_after_an_error_too(played: dict[str, bytes]) -> None:
    with pytest.raises(KeyboardInterrupt), RayView("auto", ExpectedNodes((), 2)):
        raise KeyboardInterrupt
    assert PlayedSession.done == ["auto", "left"]


def status(*pending: list[str]) -> bytes:
    return json.dumps({"autoscaler_report": {"pending_nodes": pending, "failed_nodes": []}}).encode()


@pytest.mark.parametrize("told", [None, b"{}", b'{"autoscaler_report": null}', b'{"autoscaler_report": {}}'])
def test_an_autoscaler_that_has_not_reported_tells_of_no_node(told: bytes | None) -> None:
    assert autoscaler_states(told) == {}


def test_notes_that_are_not_there_or_are_being_written_tell_of_no_node(tmp_path: Path) -> None:
    half = tmp_path / "half.state"
    half.write_text('{"10.0.0.1": {"ta')
    assert [noted_states(file) for file in (None, tmp_path / "absent", half)] == [{}, {}, {}]


def test_of_long_logs_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "2026-11-30 20:48:31,571\tERROR a.py:1 -- Terminating the node with id {0} and ip {0}. (launch failed)\n"
    (tmp_path / "monitor.log").write_text(line.format("10.0.0.2") * 100 + line.format("10.0.0.3"))
    monkeypatch.setattr(ray_view, "LOG_BYTES", len(line.format("10.0.0.3")))
    assert list(monitor_logs(tmp_path, {}).nodes) == ["10.0.0.3"]


@pytest.mark.parametrize(("num_bytes", "nodes"), [(60, []), (110, ["10.0.0.3"]), (10**6, ["10.0.0.21", "10.0.0.3"])])
def test_lines_that_are_there_by_half_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, nodes: list[str]
) -> None:
    line = "2026-11-30 20:48:31,571\tINFO a.py:1 -- Creating new (spawn_updater) updater thread for node {}.\n"
    half = line.format("10.0.0.4").partition("0.4")[0]  # a node "10.0" to one who took it for whole
    (tmp_path / "monitor.log").write_text(line.format("10.0.0.21") + line.format("10.0.0.3") + half)
    monkeypatch.setattr(ray_view, "LOG_BYTES", len(half) + num_bytes)
    assert list(monitor_logs(tmp_path, {}).nodes) == nodes


def test_an_autoscaler_that_was_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    for pid, age_s, is_lost in ((ended, 60, True), (ended, 5, False), (os.getpid(), 60, False)):
        told = lost_monitor(json.dumps({"monitor_pid": int(pid), "time": time.time() - age_s}).encode())
        assert (told is not None) == is_lost
    assert [lost_monitor(told) for told in (None, b"{}")] == [None, None]


def test_a_killed_autoscaler_is_known_on_the_head_alone(played: dict[str, bytes], tmp_path: Path) -> None:
    played["__autoscaling_status"] = json.dumps({"monitor_pid": 2**22 + 1, "time": 0}).encode()
    with RayView("auto", ExpectedNodes((), 2)) as view:
        assert view.look().autoscaler_error is None
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "monitor.log").touch()
        assert "has gone; monitor.log" in str(view.look().autoscaler_error)


def test_names_are_resolved_and_addresses_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(name: str) -> str:
        if name != "worker":
            raise OSError(name)
        return "10.0.0.2"

    monkeypatch.setattr(ray_view, "socket", SimpleNamespace(gethostbyname=lookup))
    found: dict[str, Any] = {name: resolved(name) for name in ("worker", "unknown", "10.0.0.9", "fe80::1")}
    assert found == {"worker": "10.0.0.2", "unknown": "unknown", "10.0.0.9": "10.0.0.9", "fe80::1": "fe80::1"}
