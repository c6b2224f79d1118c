# SPDX-License-Identifier: MIT OR Apache-2.0
"""The facts of every node of a Ray cluster: one short-lived actor on each looks around and tries the others' ports.

Rules. All nodes are asked at once, and each has until the deadline; one that does not answer is named, and the others
are examined all the same. The actors need no core, so a busy cluster can be examined, and get of the driver's
environment what ranks get, so that they find the same models. Nothing stays: actors, sockets and, where it was joined
here, the connection to Ray end before this returns. No Ray is ever started.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from metrale_ray.doctor.collect import collect
from metrale_ray.doctor.facts import ClusterFacts, NodeFacts
from metrale_ray.reach import CONNECT_TIMEOUT_S, why_silent, why_unreachable

BACKLOG = 64
DRIVER = "this process"

Refs = dict[str, Any]
Target = tuple[str, int]


class Probe:
    """What runs on each node. Its socket is listened on by the kernel alone: a connection needs no thread here."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def look(self, model: str | None, revision: str | None) -> dict[str, Any]:
        """The node's facts."""
        return collect(model, revision)

    def listen(self, host: str) -> tuple[int | None, str | None]:
        """A port on `host` that can be connected to, or why there is none."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            return None, error.strerror or str(error)
        self._listener = listener
        return listener.getsockname()[1], None

    def reach(self, targets: Mapping[str, Target]) -> dict[str, str | None]:
        """For each target None when a connection could be made, and the reason when not."""
        return {name: why_unreachable(*target) for name, target in targets.items()}

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()


def examine(address: str, model: str | None, revision: str | None, timeout_s: float) -> ClusterFacts:
    """Join the Ray at `address`, ask every node, and leave. `timeout_s` is for each of three questions."""
    driver = NodeFacts.read(DRIVER, collect())
    joined_here = not ray.is_initialized()
    if joined_here:
        error = _join(address)
        if error is not None:
            return ClusterFacts((), address=address, driver=driver, cluster_error=error, model=model)
    try:
        return _examine(address, driver, model, revision, timeout_s)
    finally:
        if joined_here:
            ray.shutdown()


def _join(address: str) -> str | None:
    """Connect to Ray; the reason when that fails."""
    silent = why_silent(address)
    if silent is not None:
        return silent
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        from metrale_ray.cluster.endings import version_mismatch  # as in `_probe`

        return version_mismatch(error) or _first_line(error)
    return None


def _examine(
    address: str, driver: NodeFacts, model: str | None, revision: str | None, timeout_s: float
) -> ClusterFacts:
    listed = _named_nodes()
    probes = {name: _probe(node["NodeID"]) for name, node in listed.items()}
    try:
        hosts = {name: str(node["NodeManagerAddress"]) for name, node in listed.items()}
        seen, silent = _ask({name: probe.look.remote(model, revision) for name, probe in probes.items()}, timeout_s)
        doors, _ = _ask({name: probes[name].listen.remote(hosts[name]) for name in seen}, timeout_s)
        targets = {name: (hosts[name], port) for name, (port, _) in doors.items() if port is not None}
        others = {name: {other: place for other, place in targets.items() if other != name} for name in seen}
        # One after the other, so a node that reaches nobody needs the time of all of them.
        wait_s = timeout_s + CONNECT_TIMEOUT_S * len(targets)
        reached, lost = _ask({name: probes[name].reach.remote(others[name]) for name in seen}, wait_s)
    finally:
        for probe in probes.values():
            ray.kill(probe, no_restart=True)
    return ClusterFacts(
        nodes=tuple(_facts(name, listed[name], seen[name], doors.get(name, (None, None))[1]) for name in seen),
        address=address,
        driver=driver,
        silent={**silent, **lost},
        unreachable={(name, to): why for name, found in reached.items() for to, why in found.items() if why},
        num_connections=sum(map(len, reached.values())),
        model=model,
    )


def _named_nodes() -> dict[str, dict[str, Any]]:
    """The nodes that Ray counts as alive, by address, and by address and id where several share one."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    count = Counter(node["NodeManagerAddress"] for node in nodes)
    return {_name(node, count[node["NodeManagerAddress"]]): node for node in nodes}


def _name(node: Mapping[str, Any], num_sharing: int) -> str:
    address = str(node["NodeManagerAddress"])
    return address if num_sharing == 1 else f"{address}#{node['NodeID'][:8]}"


def _probe(node_id: str) -> Any:
    # Not at the top: nodes import this file too, and one whose libraries are broken must still answer.
    from metrale_ray.cluster.environment import runtime_env

    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "runtime_env": runtime_env(os.environ)}
    return ray.remote(Probe).options(scheduling_strategy=pinned, **options).remote()


def _ask(refs: Refs, timeout_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers that came in time, and for the other nodes the reason."""
    deadline = time.monotonic() + timeout_s
    answers: dict[str, Any] = {}
    silent: dict[str, str] = {}
    for name, ref in refs.items():
        try:
            answers[name] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            silent[name] = f"no answer within {timeout_s:g} s"
        except ray.exceptions.RayError as error:
            silent[name] = _reason(error)
    return answers, silent


def _facts(name: str, node: Mapping[str, Any], seen: Mapping[str, Any], bind_error: str | None) -> NodeFacts:
    resources = node["Resources"]
    of_ray = {
        "node_id": node["NodeID"],
        "ray_address": str(node["NodeManagerAddress"]),
        "ray_cores": resources.get("CPU", 0.0),
        "ray_gpus": resources.get("GPU", 0.0),
        "bind_error": bind_error,
    }
    return NodeFacts.read(name, {**seen, **of_ray})


def _reason(error: BaseException) -> str:
    """What is wrong with a node whose actor failed: a module that is missing there is at the end of Ray's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line]
    return (named or lines or [type(error).__name__])[-1 if named else 0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
