# SPDX-License-Identifier: MIT OR Apache-2.0
"""The judgement: from facts to findings, each with what to do about it. Nothing here looks at a machine.

Rules. `problem`: an engine would not start, or not run right; `warning`: it would, worse than it could. What ranks must
have in common at the handshake is a problem where nodes differ. A fact that is not known is not judged.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from metrale_ray.doctor.facts import ClusterFacts, NodeFacts

Level = Literal["ok", "warning", "problem"]

GIB = 2**30
# The oldest versions that are served, as in pyproject.toml.
MINIMUM_VERSIONS = {
    "python": "3.11",
    "ray": "2.50",
    "torch": "2.6",
    "pyzmq": "26",
    "msgpack": "1.0.8",
    "safetensors": "0.5",
    "transformers": "4.56",
    "numpy": "1.26",
}
# The handshake and Ray compare these; the others matter less.
EQUAL_VERSIONS = ("python", "ray", "torch", "metrale_ray")
# A container has 64 MiB unless it is told otherwise; Ray's object store and NCCL want far more.
LITTLE_SHARED_MEMORY = GIB
# A rank takes this before it has a weight, for torch and Ray.
RANK_MEMORY = GIB // 2
LITTLE_MEMORY = 2 * GIB
# A head has a few descriptors for each rank and front; Ray's own processes have some for each worker.
FEWEST_FILES, FEW_FILES = 256, 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was judged. `node` is None for what concerns all, `advice` (what to do) when all is well."""

    level: Level
    subject: str
    text: str
    advice: str | None = None
    node: str | None = None


def judge(facts: ClusterFacts) -> list[Finding]:
    """All findings: the cluster's first, then each node's."""
    return [*_cluster(facts), *(finding for node in _machines(facts) for finding in judge_node(node))]


def has_problem(findings: list[Finding]) -> bool:
    """Whether any of them is a problem."""
    return any(finding.level == "problem" for finding in findings)


def judge_node(node: NodeFacts) -> Iterator[Finding]:
    """The findings of one machine."""
    for subject, rule in NODE_RULES.items():
        judged = rule(node)
        if judged is not None:
            level, text, advice = judged
            yield Finding(level, subject, text, advice, node.name)


Judged = tuple[Level, str, str | None] | None


def _versions(node: NodeFacts) -> Judged:
    if not node.versions:
        return None
    missing = [name for name, version in node.versions.items() if version is None]
    old = [
        f"{name} {version} (needs {least})"
        for name, least in MINIMUM_VERSIONS.items()
        if (version := node.versions.get(name)) is not None and _number(version) < _number(least)
    ]
    text = ", ".join(f"{name} {version}" for name, version in node.versions.items() if version is not None)
    if missing or old:
        lacking = [*(f"{name} is not installed" for name in missing), *(f"{name}" for name in old)]
        return (
            "problem",
            "; ".join(lacking),
            "install this package again with its dependencies: pip install -U metrale-ray",
        )
    return "ok", text, None


def _imports(node: NodeFacts) -> Judged:
    if node.import_errors:
        text = "; ".join(f"{name} cannot be imported: {why}" for name, why in node.import_errors.items())
        return "problem", text, f"install it again: pip install --force-reinstall {' '.join(node.import_errors)}"
    if node.has_curve is False:
        return "problem", "this pyzmq has no CURVE, so ranks could not know each other", "install pyzmq's own wheel"
    if node.build is None:
        return None
    return "ok", f"build {node.build}, kernels for {node.instructions}", None


def _addresses(node: NodeFacts) -> Judged:
    known = ", ".join(f"{name} {' '.join(found)}" for name, found in node.addresses.items())
    others = [a for found in node.addresses.values() for a in found if not _is_loopback(a)]
    if node.bind_error is not None:
        advice = f"start Ray there with --node-ip-address set to one of its own: {known or 'none was found'}"
        return "problem", f"no port can be opened on {node.ray_address}: {node.bind_error}", advice
    if not others and node.addresses and node.ray_address is None:
        return "warning", f"only the loopback interface has an address ({known})", "other nodes cannot reach this one"
    at = f"Ray knows it by {node.ray_address}; " if node.ray_address is not None else ""
    return ("ok", f"{at}{known}", None) if known else None


def _shared_memory(node: NodeFacts) -> Judged:
    size, free = node.shared_memory, node.shared_memory_free
    if size is None or free is None:
        return None
    text = f"/dev/shm has {_gib(size)}, {_gib(free)} of it free"
    if size < LITTLE_SHARED_MEMORY:
        return "warning", text, "give a container more of it, such as --shm-size=8g, or Ray keeps objects on disk"
    if free < LITTLE_SHARED_MEMORY:
        return "warning", text, "remove what other programs left in /dev/shm"
    return "ok", text, None


def _cores(node: NodeFacts) -> Judged:
    if node.cores is None:
        return None
    text = f"{node.cores:g} of {node.machine_cores} cores may be used"
    if node.ray_cores is not None and node.ray_cores > node.cores:
        text += f", and Ray offers {node.ray_cores:g}"
        return "warning", text, f"ranks would share cores: start Ray there with --num-cpus={max(1, int(node.cores))}"
    if node.cores < 1:
        return "warning", text, "raise the container's limit to at least one core for each rank"
    return "ok", text, None


def _memory(node: NodeFacts) -> Judged:
    if node.memory is None:
        return None
    limit = "" if node.memory_limit is None else f" under a limit of {_gib(node.memory_limit)}"
    text = f"{_gib(node.memory)} can be had{limit}"
    if node.memory < RANK_MEMORY:
        return "problem", text, f"free some: a rank takes {_gib(RANK_MEMORY)} before it has a weight"
    if node.memory < LITTLE_MEMORY:
        return "warning", text, "free some, or see with `metrale-ray inspect MODEL --memory SIZE` what fits"
    return "ok", text, None


def _open_files(node: NodeFacts) -> Judged:
    if node.open_files is None:
        return None
    text = f"a process may have {node.open_files} files open"
    if node.open_files >= FEW_FILES:
        return "ok", text, None
    advice = "raise the limit before Ray starts: ulimit -n 65536"
    return ("problem" if node.open_files < FEWEST_FILES else "warning"), text, advice


def _gpus(node: NodeFacts) -> Judged:
    if not node.gpus:
        return "ok", "none; ranks compute on the CPU", None
    text = "; ".join(node.gpus)
    if not node.import_errors and node.torch_cuda is None:
        return "warning", f"{text}; this torch is built without CUDA", "install a torch with CUDA to use them"
    if node.ray_gpus is not None and node.ray_gpus < len(node.gpus):
        offered = f"Ray offers {node.ray_gpus:g} of {len(node.gpus)}"
        return "warning", f"{text}; {offered}", f"start Ray there with --num-gpus={len(node.gpus)}"
    return "ok", text, None


def _checkpoint(node: NodeFacts) -> Judged:
    if node.checkpoint_error is not None:
        return "problem", node.checkpoint_error, "put the whole checkpoint under the same path on every node"
    if not node.checkpoint_digests:
        return None
    return "ok", f"can be served, {len(node.checkpoint_digests)} files were looked at", None


NODE_RULES: dict[str, Callable[[NodeFacts], Judged]] = {
    "versions": _versions,
    "libraries": _imports,
    "addresses": _addresses,
    "shared memory": _shared_memory,
    "cores": _cores,
    "memory": _memory,
    "open files": _open_files,
    "gpus": _gpus,
    "checkpoint": _checkpoint,
}


def _cluster(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.address is None:
        yield Finding("ok", "ray", "no address (--address or RAY_ADDRESS): only this machine was checked")
        return
    if facts.cluster_error is not None:
        text = f"no Ray at {facts.address}: {facts.cluster_error}"
        yield Finding("problem", "ray", text, "start it with `ray start`, or give another --address")
        return
    names = ", ".join(sorted([*(node.name for node in facts.nodes), *(facts.silent.keys() - _names(facts))]))
    yield Finding("ok", "ray", f"{facts.address} has the nodes {names}")
    for name, why in facts.silent.items():
        yield Finding("problem", "answer", why, _silence_advice(why), name)
    yield from _differences(facts)
    yield from _connections(facts)


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
    loopback = [n.name for n in facts.nodes if n.ray_address is not None and _is_loopback(n.ray_address)]
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


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _number(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 2.13.0+cpu is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version, maxsplit=1)[0]))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"


def as_mapping(finding: Finding) -> dict[str, Any]:
    """A finding for JSON."""
    return {
        "level": finding.level,
        "subject": finding.subject,
        "node": finding.node,
        "text": finding.text,
        "advice": finding.advice,
    }
