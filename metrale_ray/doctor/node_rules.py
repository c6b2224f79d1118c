# SPDX-License-Identifier: MIT OR Apache-2.0
"""The judgement of one machine, from its facts alone. A fact that is not known is not judged."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator

from metrale_ray.doctor.facts import NodeFacts
from metrale_ray.doctor.finding import Finding, Level

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
# A container has 64 MiB unless it is told otherwise; Ray's object store and NCCL want far more.
LITTLE_SHARED_MEMORY = GIB
# A rank takes this before it has a weight, for torch and Ray.
RANK_MEMORY = GIB // 2
LITTLE_MEMORY = 2 * GIB
# A head has a few descriptors for each rank and front; Ray's own processes have some for each worker.
FEWEST_FILES, FEW_FILES = 256, 1024

# A level, what was seen, and what to do about it.
Judged = tuple[Level, str, str | None] | None


def judge_node(node: NodeFacts) -> Iterator[Finding]:
    """The findings of one machine."""
    for subject, rule in NODE_RULES.items():
        judged = rule(node)
        if judged is not None:
            level, text, advice = judged
            yield Finding(level, subject, text, advice, node.name)


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
    others = [a for found in node.addresses.values() for a in found if not is_loopback(a)]
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


def _native_core(node: NodeFacts) -> Judged:
    if node.native_core_missing is not None and not node.gpus:
        text = f"there is none, so CPU ranks use PyTorch's slower kernels: {node.native_core_missing}"
        advice = "with a C++ compiler installed, run there: python -m metrale_ray.native.compile"
        return "warning", text, advice
    return None if node.native_core is None else ("ok", node.native_core, None)


def _checkpoint(node: NodeFacts) -> Judged:
    if node.checkpoint_error is not None:
        return "problem", node.checkpoint_error, "put the whole checkpoint under the same path on every node"
    if node.checkpoint_absent is not None:
        return "warning", node.checkpoint_absent, "fetch it before a start, whose time limit counts while it is fetched"
    if not node.checkpoint_digests:
        return None
    return "ok", f"can be served, {len(node.checkpoint_digests)} files were looked at", None


NODE_RULES: dict[str, Callable[[NodeFacts], Judged]] = {
    "versions": _versions,
    "libraries": _imports,
    "native core": _native_core,
    "addresses": _addresses,
    "shared memory": _shared_memory,
    "cores": _cores,
    "memory": _memory,
    "open files": _open_files,
    "gpus": _gpus,
    "checkpoint": _checkpoint,
}


def is_loopback(address: str) -> bool:
    """Whether only the machine itself can reach `address`."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _number(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 2.13.0+cpu is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version, maxsplit=1)[0]))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
