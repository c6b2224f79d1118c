# SPDX-License-Identifier: MIT OR Apache-2.0
"""What decides a rank's bits, as the handshake compares it."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import pytest
import torch

from metrale_ray.model import identity


def test_the_digest_of_sources_is_another_one_when_a_file_or_its_name_differs(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    found = set()
    for text in ("x = 1", "x = 2"):
        source.write_text(text)
        found.add(identity.source_digest(tmp_path))
        assert identity.source_digest(tmp_path) in found
    source.rename(tmp_path / "b.py")
    found.add(identity.source_digest(tmp_path))
    assert len(found) == 3
    assert identity.build() == identity.source_digest(Path(identity.__file__).parents[1])


def test_a_machine_that_does_not_tell_its_processor_has_no_maker_and_no_flags(tmp_path: Path) -> None:
    assert identity.instructions(torch.device("cpu"), tmp_path) == torch.backends.cpu.get_cpu_capability()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor : 0\nvendor_id\t: Maker\nflags\t\t: fma avx2\n\nvendor_id : Other\n"
    )
    assert identity.instructions(torch.device("cpu"), tmp_path).endswith(" Maker fma avx2")


def test_the_instructions_name_what_kernels_are_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_processor", lambda root: ("Maker", {"fma", "avx2", "sse2"}))
    capability = torch.backends.cpu.get_cpu_capability()
    assert identity.instructions(torch.device("cpu")) == f"{capability} Maker fma avx2"


def test_versions_are_of_python_ray_and_torch() -> None:
    assert identity.versions() == {
        "python": platform.python_version(),
        "ray": importlib.metadata.version("ray"),
        "torch": torch.__version__,
    }


def test_a_package_that_is_not_installed_has_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert identity.versions.__wrapped__()["ray"] == "unknown"
