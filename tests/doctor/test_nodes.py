# SPDX-License-Identifier: MIT OR Apache-2.0
"""The doctor on a real Ray of one node, and of two, one of which stops answering; and what leaves no trace."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from metrale_ray.cli import main
from metrale_ray.doctor.nodes import Probe, examine
from metrale_ray.reach import why_unreachable
from tests.fixtures.tiny import write_tiny

COMMIT = "c" * 40


def test_a_port_that_is_listened_on_is_reached_and_a_closed_one_is_not() -> None:
    probe = Probe()
    port, error = probe.listen("127.0.0.1")
    assert error is None
    assert port is not None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        reached = probe.reach({"open": ("127.0.0.1", port), "closed": closed.getsockname()})
    probe.close()
    assert reached == {"open": None, "closed": "Connection refused"}
    assert Probe().listen("192.0.2.77")[0] is None  # an address of no machine (RFC 5737)


def test_a_name_that_nobody_has_is_unreachable_with_a_reason() -> None:
    assert why_unreachable("no-such-host.invalid", 1) is not None


def test_no_ray_at_the_address_is_a_problem_and_nothing_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert main(["doctor", "--address", address, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["text"] == f"no Ray at {address}: Connection refused"
    assert not ray.is_initialized()


@pytest.fixture
def one_node() -> Iterator[Cluster]:
    """A Ray of one node on this machine, which no driver has joined."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def two_nodes(one_node: Cluster) -> Cluster:
    """The same with a second node."""
    one_node.add_node(num_cpus=1)
    return one_node


@pytest.mark.ray
def test_a_node_is_examined_with_the_drivers_hub_cache_and_nothing_stays(
    one_node: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "hub/models--owner--model/snapshots" / COMMIT, "mixtral")
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # after the node was started
    argv = ["doctor", "--address", one_node.address, "--model", "owner/model", "--revision", COMMIT, "--json"]
    code = main(argv)
    found = json.loads(capsys.readouterr().out)
    problems = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert (code, problems) == (0, [])
    (node,) = found["nodes"]
    assert node["checkpoint_digests"].keys() >= {"config.json"}
    assert node["ray_cores"] == 1.0
    assert not ray.is_initialized()


@pytest.mark.ray
@pytest.mark.nightly
def test_every_node_of_a_cluster_is_examined(
    two_nodes: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "model", "mixtral")
    code = main(["doctor", "--address", two_nodes.address, "--model", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    problems = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert (code, problems) == (0, [])
    assert len({node["name"] for node in found["nodes"]}) == 2
    assert [node["ray_cores"] for node in found["nodes"]] == [1.0, 1.0]
    assert all(node["checkpoint_digests"].keys() >= {"config.json"} for node in found["nodes"])
    assert any("every node reaches every other (2 connections)" in f["text"] for f in found["findings"])


@pytest.mark.ray
@pytest.mark.nightly  # it waits for the deadline, which a busy machine needs
def test_a_node_that_has_stopped_is_named_and_the_other_is_examined(two_nodes: Cluster) -> None:
    raylet = two_nodes.list_all_nodes()[1].all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        facts = examine(two_nodes.address, None, None, timeout_s=60)
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert len(facts.nodes) == 1
    assert len(facts.silent) == 1  # for the deadline, or because Ray gave it up before
    assert facts.silent.keys().isdisjoint(node.name for node in facts.nodes)
    assert not ray.is_initialized()
