# SPDX-License-Identifier: MIT OR Apache-2.0
"""One machine's judgement: every rule with facts that pass it and facts that do not."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.doctor.facts import NodeFacts
from metrale_ray.doctor.finding import Finding
from metrale_ray.doctor.node_rules import GIB, MINIMUM_VERSIONS, NODE_RULES, is_loopback, judge_node

TOP = Path(__file__).resolve().parents[2]
VERSIONS: dict[str, str | None] = {
    "python": "3.12.1",
    "metrale_ray": "0.1.0",
    "ray": "2.60.0",
    "torch": "2.13.0+cpu",
    "pyzmq": "27.0",
}
GOOD = NodeFacts(
    "n1",
    versions=VERSIONS,
    build="b1",
    instructions="AVX512 GenuineIntel",
    has_curve=True,
    native_core="avx512 kernels run; built for generic, avx2, avx512 by 12.2.0",
    addresses={"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1"]},
    ray_address="10.0.0.1",
    port_range=[32768, 60999],
    shared_memory=16 * GIB,
    shared_memory_free=15 * GIB,
    cores=8.0,
    machine_cores=16,
    ray_cores=8.0,
    memory=64 * GIB,
    memory_limit=65 * GIB,
    open_files=65536,
    open_files_hard=65536,
    checkpoint_digests={"config.json": "d1"},
)


def findings(**changes: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in judge_node(dataclasses.replace(GOOD, **changes))}


def test_a_good_machine_passes_every_rule() -> None:
    found = findings()
    assert found.keys() == NODE_RULES.keys()
    assert {finding.level for finding in found.values()} == {"ok"}
    assert {finding.node for finding in found.values()} == {"n1"}
    assert all(finding.advice is None for finding in found.values())


def test_what_is_not_known_is_not_judged() -> None:
    found = list(judge_node(NodeFacts("n1")))
    assert [(finding.subject, finding.level) for finding in found] == [("gpus", "ok")]


BAD: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "a package is missing": (
        {"versions": {**VERSIONS, "torch": None}},
        "versions",
        "problem",
        "torch is not installed",
        "pip install",
    ),
    "a package is old": (
        {"versions": {**VERSIONS, "ray": "2.9.3"}},
        "versions",
        "problem",
        "ray 2.9.3 (needs 2.50)",
        "pip install",
    ),
    "an import fails": (
        {"import_errors": {"torch": "OSError: libcudart.so.12"}},
        "libraries",
        "problem",
        "torch cannot be imported: OSError: libcudart.so.12",
        "pip install --force-reinstall torch",
    ),
    "no native core": (
        {"native_core": None, "native_core_missing": "it was not built when metrale-ray was installed"},
        "native core",
        "warning",
        "PyTorch's slower kernels: it was not built",
        "python -m metrale_ray.native.compile",
    ),
    "no curve": ({"has_curve": False}, "libraries", "problem", "has no CURVE", "pyzmq's own wheel"),
    "no port can be opened": (
        {"bind_error": "Cannot assign requested address", "ray_address": "10.9.9.9"},
        "addresses",
        "problem",
        "no port can be opened on 10.9.9.9: Cannot assign requested address",
        "--node-ip-address set to one of its own: lo 127.0.0.1 ::1, eth0 10.0.0.1",
    ),
    "only loopback": (
        {"addresses": {"lo": ["127.0.0.1"]}, "ray_address": None},
        "addresses",
        "warning",
        "only the loopback interface",
        "other nodes cannot reach",
    ),
    "a container's shared memory": (
        {"shared_memory": 64 * 2**20, "shared_memory_free": 64 * 2**20},
        "shared memory",
        "warning",
        "0.0625 GiB",
        "--shm-size",
    ),
    "full shared memory": (
        {"shared_memory_free": 2**20},
        "shared memory",
        "warning",
        "of it free",
        "remove what other programs left",
    ),
    "more cores than may be used": (
        {"cores": 2.0},
        "cores",
        "warning",
        "2 of 16 cores may be used, and Ray offers 8",
        "--num-cpus=2",
    ),
    "less than a core": (
        {"cores": 0.5, "ray_cores": None},
        "cores",
        "warning",
        "0.5 of 16",
        "at least one core for each rank",
    ),
    "no memory": ({"memory": 100 * 2**20}, "memory", "problem", "under a limit of 65 GiB", "free some: a rank takes"),
    "little memory": ({"memory": GIB}, "memory", "warning", "1 GiB can be had", "metrale-ray inspect"),
    "no files": ({"open_files": 128}, "open files", "problem", "128 files", "ulimit -n"),
    "few files": ({"open_files": 512}, "open files", "warning", "512 files", "ulimit -n"),
    "gpus without cuda": (
        {"gpus": ["NVIDIA H200, 1 MiB, 570"]},
        "gpus",
        "warning",
        "built without CUDA",
        "a torch with CUDA",
    ),
    "gpus that Ray does not offer": (
        {"gpus": ["NVIDIA H200", "NVIDIA H200"], "torch_cuda": "12.8", "ray_gpus": 1.0},
        "gpus",
        "warning",
        "Ray offers 1 of 2",
        "--num-gpus=2",
    ),
    "a checkpoint that is not there": (
        {"checkpoint_error": "model '/m' was not found", "checkpoint_digests": {}},
        "checkpoint",
        "problem",
        "model '/m' was not found",
        "same path on every node",
    ),
}


@pytest.mark.parametrize(("changes", "subject", "level", "text", "advice"), BAD.values(), ids=BAD.keys())
def test_each_fault_is_found_with_what_to_do(
    changes: dict[str, Any], subject: str, level: str, text: str, advice: str
) -> None:
    found = findings(**changes)
    finding = found.pop(subject)
    assert finding.level == level
    assert text in finding.text
    assert finding.advice is not None
    assert advice in finding.advice
    assert {other.level for other in found.values()} == {"ok"}


def test_gpus_that_can_be_used_are_named() -> None:
    assert findings(gpus=["NVIDIA H200"], torch_cuda="12.8", ray_gpus=1.0)["gpus"].text == "NVIDIA H200"


def test_the_oldest_versions_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"])  # type: ignore[union-attr]
    asked["python"] = project["requires-python"].removeprefix(">=")
    assert {name: asked[name] for name in MINIMUM_VERSIONS} == MINIMUM_VERSIONS


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("h7", False)],
)
def test_loopback_addresses_are_known(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
