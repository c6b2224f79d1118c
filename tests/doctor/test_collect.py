# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is seen of this machine, and of made-up ones whose files lie in a folder."""

from __future__ import annotations

import os
import platform
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from metrale_ray.doctor import collect as module
from metrale_ray.doctor.collect import addresses, checkpoint, collect, cores, gpus, memory, port_range, shared_memory
from metrale_ray.doctor.facts import NodeFacts
from metrale_ray.doctor.node_rules import judge_node
from metrale_ray.model import hub, identity
from metrale_ray.native import library
from tests.fixtures.tiny import write_tiny
from tests.model.test_memory import machine

MIB = 2**20


def test_this_machine_is_seen_whole() -> None:
    facts = NodeFacts.read("here", collect())
    assert facts.versions["python"] == platform.python_version()
    assert facts.versions["torch"]
    assert facts.import_errors == {}
    assert facts.build == identity.build()
    assert facts.instructions
    assert facts.has_curve is True
    assert (facts.native_core is None) == (library.library() is None) == (facts.native_core_missing is not None)
    assert any("127.0.0.1" in found for found in facts.addresses.values())
    assert facts.shared_memory is not None
    assert facts.cores is not None
    assert 0 < facts.cores <= (facts.machine_cores or 0)
    assert facts.memory is not None
    assert 0 < facts.memory < 2**50
    assert (facts.open_files or 0) > 0
    subjects = {finding.subject for finding in judge_node(facts)}
    assert subjects >= {"versions", "libraries", "addresses", "shared memory", "cores", "memory", "open files", "gpus"}


def test_facts_of_another_version_are_read_as_far_as_they_are_known() -> None:
    facts = NodeFacts.read("n", {"host": "h", "from_the_future": 1, "name": "a lie"})
    assert (facts.name, facts.host, facts.build) == ("n", "h", None)


def test_a_machine_without_these_files_gives_no_facts_of_them(tmp_path: Path) -> None:
    assert shared_memory(tmp_path) == {}
    assert port_range(tmp_path) is None
    assert memory(tmp_path) == {"memory": None, "memory_limit": None}
    assert cores(tmp_path)["cores"] == len(os.sched_getaffinity(0))


GROUPS = {
    "version 2": {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        "sys/fs/cgroup/a/memory.max": f"{100 * MIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{60 * MIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "0\n",
    },
    "version 1": {
        "proc/self/cgroup": "9:pids:/\n4:memory:/a\n1:cpu:/a\n0::/\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{100 * MIB}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{60 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    },
}


@pytest.mark.parametrize("files", GROUPS.values(), ids=GROUPS.keys())
def test_a_control_groups_limits_count_also_those_of_the_groups_around_it(
    tmp_path: Path, files: dict[str, str]
) -> None:
    root = machine(tmp_path, {**files, "proc/meminfo": "MemTotal: 1 kB\nMemAvailable:   204800 kB\n"})
    assert cores(root)["cores"] == 0.5
    assert memory(root) == {"memory": 40 * MIB, "memory_limit": 100 * MIB}


def test_addresses_of_the_sixth_version_are_read_from_the_systems_list(tmp_path: Path) -> None:
    line = "fd000000000000000000000000000002 04 40 00 82     eth9\n"
    assert addresses(machine(tmp_path, {"proc/net/if_inet6": line}))["eth9"] == ["fd00::2"]


def test_gpus_are_what_the_drivers_tool_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\necho\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus() == {"gpus": ["NVIDIA H200, 143771 MiB, 570.1"]}
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert gpus() == {"gpus": []}
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus() == {"gpus": []}


def test_a_checkpoint_has_digests_or_a_reason(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    assert checkpoint(str(folder), None)["checkpoint_digests"].keys() >= {"config.json", "model.safetensors"}
    (folder / "model.safetensors").unlink()
    assert "has no weights" in checkpoint(str(folder), None)["checkpoint_error"]
    assert "was not found" in checkpoint(str(tmp_path / "none"), None)["checkpoint_error"]


def test_a_checkpoint_of_odd_values_or_with_an_unforeseen_fault_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    (folder / "config.json").write_text('{"architectures": 5}')
    assert "sets architectures to 5" in checkpoint(str(folder), None)["checkpoint_error"]

    def fail(*values: Any) -> str:
        raise MemoryError

    monkeypatch.setattr(module, "_digests", fail)
    assert checkpoint(str(folder), None) == {"checkpoint_error": "MemoryError: no reason given"}


def test_a_hub_id_that_is_not_in_the_cache_is_said_and_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for offline, level in ((False, "warning"), (True, "problem")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        *_, finding = judge_node(NodeFacts.read("n", checkpoint("owner/model", None)))
        assert (finding.level, finding.subject) == (level, "checkpoint")
        assert "'owner/model' is not in the hub's cache here" in finding.text
        assert finding.advice


def test_a_machine_without_proc_has_libraries_all_the_same(tmp_path: Path) -> None:
    facts = collect(root=tmp_path)
    assert facts["import_errors"] == {}
    assert facts["instructions"] == torch.backends.cpu.get_cpu_capability()


def test_a_library_that_cannot_be_imported_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*values: Any) -> str:
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(identity, "build", fail)
    facts = collect()
    assert facts["import_errors"] == {"torch": "OSError: libgomp.so.1: cannot open shared object file"}
    assert "build" not in facts
    assert module.versions()["torch"] == facts["versions"]["torch"]
