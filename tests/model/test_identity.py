# SPDX-License-Identifier: MIT OR Apache-2.0
"""What decides a rank's bits, as the handshake compares it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from metrale_ray.model import identity


def test_the_build_is_the_same_each_time_and_another_one_when_a_source_file_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert identity.build() == identity.build()
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "model" / "identity.py"))
    source = tmp_path / "a.py"
    found = set()
    for text in ("x = 1", "x = 2"):
        source.write_text(text)
        found.add(identity.build())
    source.rename(tmp_path / "b.py")
    found.add(identity.build())
    assert len(found) == 3


def test_the_instructions_name_what_kernels_are_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_processor", lambda: ("Maker", {"fma", "avx2", "sse2"}))
    capability = torch.backends.cpu.get_cpu_capability()
    assert identity.instructions(torch.device("cpu")) == f"{capability} Maker fma avx2"
