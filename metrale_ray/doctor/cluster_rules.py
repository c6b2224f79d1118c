# SPDX-License-Identifier: MIT OR Apache-2.0
"""The judgement of a cluster: what its nodes have in common, and whether they reach each other.

Rules. What ranks must have in common at the handshake is a problem where nodes differ. Nothing here looks at a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from metrale_ray.doctor.facts import ClusterFacts, NodeFacts
from metrale_ray.doctor.finding import Finding, Level
from metrale_ray.doctor.node_rules import is_loopback, judge_node

# The handshake and Ray compare these; the others matter less.
EQUAL_VERSIONS = ("python", "ray", "torch", "metrale_ray")


def judge(facts: ClusterFacts) -> list[Finding]:
    """All findings: the cluster's first, then each node's."""
    return [*_cluster(facts), *(finding for node in _machines(facts) for finding in judge_node(node))]


def _cluster(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.address is None:
        yield Finding("ok", "ray", "no address (--address or RAY_ADDRESS): only this machine was checked")
        return
    if facts.cluster_error is not None:
        yield _no_cluster(facts.address, facts.cluster_error)
        return
    names = ", ".join(sorted([*(node.name for node in facts.nodes), *(facts.silent.keys() - _names(facts))]))
    yield Finding("ok", "ray", f"{facts.address} has the nodes {names}")
    for name, why in facts.silent.items():
        yield Finding("problem", "answer", why, _silence_advice(why), name)
    yield from _differences(facts)
    yield from _connections(facts)


def _no_cluster(address: str, why: str) -> Finding:
    if "and this process has Ray" in why:
        return Finding("problem", "ray", f"cannot join Ray at {address}: {why}", "use the same versions everywhere")
    return Finding(
        "problem", "ray", f"no Ray at {address}: {why}", "start it with `ray start`, or give another --address"
    )


def _names(facts: ClusterFacts) -> set[str]:
    return {node.name for node in facts.nodes}


def _silence_advice(why: str) -> str:
    if "No module named" in why or "has no attribute" in why:
        return "install this version of metrale-ray there, in the environment that Ray was started from"
    return "see whether the node is overloaded or has gone (`ray status`), or allow more time with --timeout-s"


def _differences(facts: ClusterFacts) -> Iterator[Finding]:
    """What must be the same on all nodes, and for what the driver sends also there."""
    versions = dict.fromkeys(name for node in facts.nodes for name in node.versions)
    for name in versions:
        level: Level = "problem" if name in EQUAL_VERSIONS else "warning"
        asked = (*facts.nodes, *_driver(facts)) if name in EQUAL_VERSIONS and name != "torch" else facts.nodes
        advice = f"install the same {name} everywhere"
        yield from _differing(level, name, {n.name: n.versions.get(name) for n in asked}, advice)
    builds = {node.name: node.build for node in (*facts.nodes, *_driver(facts))}
    yield from _differing("problem", "build", builds, "install the same source files of metrale-ray everywhere")
    if len(facts.nodes) > 1:
        yield from _kernels(facts.nodes)
    yield from _files(tuple(node for node in facts.nodes if node.checkpoint_digests))


def _files(nodes: tuple[NodeFacts, ...]) -> Iterator[Finding]:
    """The checkpoint's files: a node that lacks one differs too."""
    for file in sorted({file for node in nodes for file in node.checkpoint_digests}):
        digests: dict[str, str | None] = {n.name: n.checkpoint_digests.get(file, "not there") for n in nodes}
        yield from _differing("problem", file, digests, "copy one checkpoint to every node")


def _driver(facts: ClusterFacts) -> tuple[NodeFacts, ...]:
    return () if facts.driver is None else (facts.driver,)


def _kernels(nodes: tuple[NodeFacts, ...]) -> Iterator[Finding]:
    """Ranks compute on GPUs where every node has some, and then it is those that must be alike."""
    with_gpus = [node.name for node in nodes if node.gpus]
    advice = "ranks of one engine need the same kind; use nodes that are alike"
    if len(with_gpus) == len(nodes):
        kinds: dict[str, str | None] = {n.name: ", ".join(sorted({_gpu_kind(gpu) for gpu in n.gpus})) for n in nodes}
        yield from _differing("problem", "kind of gpu", kinds, advice)
        return
    if with_gpus:
        text = f"only {', '.join(with_gpus)} of {len(nodes)} nodes have GPUs"
        yield Finding(
            "warning", "gpus", text, "set --device cuda and as many ranks as these have GPUs, or --device cpu"
        )
    yield from _differing("problem", "kind of processor", {node.name: node.instructions for node in nodes}, advice)


def _gpu_kind(gpu: str) -> str:
    return gpu.partition(",")[0].strip()


def _differing(level: Level, subject: str, by_node: Mapping[str, str | None], advice: str) -> Iterator[Finding]:
    """One finding where the values that are known differ, with the nodes of each value."""
    groups: dict[str, list[str]] = {}
    for name, value in by_node.items():
        if value is not None:
            groups.setdefault(value, []).append(name)
    if len(groups) > 1:
        text = "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
        yield Finding(level, subject, f"nodes differ: {text}", advice)


def _connections(facts: ClusterFacts) -> Iterator[Finding]:
    loopback = [n.name for n in facts.nodes if n.ray_address is not None and is_loopback(n.ray_address)]
    if loopback and len(facts.nodes) > 1 and len(loopback) < len(facts.nodes):
        advice = "start Ray there with --node-ip-address set to an address that the others can reach"
        yield Finding("problem", "addresses", f"Ray knows {', '.join(loopback)} by a loopback address", advice)
    for (here, there), why in facts.unreachable.items():
        yield Finding("problem", "connections", f"cannot reach {there}: {why}", _ports_advice(facts, there), here)
    if facts.num_connections and not facts.unreachable:
        yield Finding("ok", "connections", f"every node reaches every other ({facts.num_connections} connections)")


def _ports_advice(facts: ClusterFacts, there: str) -> str:
    ports = next((node.port_range for node in facts.nodes if node.name == there), None)
    which = "all ports" if ports is None else f"ports {ports[0]}-{ports[-1]}"
    return f"let the nodes reach each other: ranks listen on {which} of their node's address"


def _machines(facts: ClusterFacts) -> tuple[NodeFacts, ...]:
    """Each machine once: the driver's own only where no node could be asked."""
    return facts.nodes or _driver(facts)
