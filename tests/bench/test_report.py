# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import pytest

from bench import report
from bench.report import SECTIONS, chosen_sections


def test_every_section_is_a_script() -> None:
    assert all(importlib.util.find_spec(f"bench.{section.name}") for section in SECTIONS)


def test_named_sections_run_in_the_order_of_the_page() -> None:
    assert [section.name for section in chosen_sections("head,machine")] == ["machine", "head"]


def test_an_unknown_section_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"no such section: decoding; there are machine, .*decode"):
        chosen_sections("decoding,head")


def test_a_section_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()  # a checkpoint is there
    monkeypatch.setattr("sys.argv", ["report", "--model", str(tmp_path), "--only", "growth,report"])
    broken = report.Section("report", "A report", lambda args: ["--only", "nothing"])
    monkeypatch.setattr(report, "SECTIONS", (broken, chosen_sections("growth")[0]))
    with pytest.raises(SystemExit, match="failed: report"):
        report.main()
    page = capfd.readouterr().out
    assert page.index("**This section failed**") < page.index("Not modelled")
