# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `doctor` writes about this machine, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from metrale_ray import cli_doctor
from metrale_ray.cli import main
from metrale_ray.doctor import collect
from metrale_ray.doctor.facts import NodeFacts
from tests.doctor.test_node_rules import GOOD
from tests.fixtures.tiny import write_tiny


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "METRALE_LOG_LEVEL", "METRALE_EP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What `collect` sees, to be changed by a test."""
    facts = dataclasses.asdict(GOOD) | {"ray_address": None, "ray_cores": None, "checkpoint_digests": {}}
    monkeypatch.setattr(collect, "collect", lambda model, revision: facts)
    return facts


def test_this_machine_is_examined_without_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "metrale_ray.doctor.nodes", raising=False)
    folder = write_tiny(tmp_path, "llama")
    main(["doctor", "--json", "--model", str(folder)])
    found = json.loads(capsys.readouterr().out)
    assert found["address"] is None
    (node,) = found["nodes"]
    assert node["name"] == "this machine"
    assert node.keys() == {field.name for field in dataclasses.fields(NodeFacts)}
    assert node["checkpoint_digests"].keys() >= {"config.json"}
    assert found["findings"][0]["text"].endswith("only this machine was checked")
    assert "metrale_ray.doctor.nodes" not in sys.modules  # where Ray is imported


def test_a_machine_without_a_problem_ends_with_0_and_has_nothing_to_do(
    seen: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "problem" not in out
    assert "to do:" not in out
    assert "8 of 16 cores may be used" in out


def test_a_warning_says_what_to_do_and_ends_with_0(seen: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    seen["shared_memory"] = 2**20
    assert main(["doctor"]) == 0
    assert "to do: give a container more of it" in capsys.readouterr().out


def test_a_problem_ends_with_1_in_both_forms(seen: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    seen["has_curve"] = False
    assert main(["doctor"]) == 1
    assert "problem" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    (problem,) = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert problem.keys() == {"level", "subject", "node", "text", "advice"}
    assert problem["advice"]


def test_an_address_of_a_ray_that_would_be_started_means_this_machine(
    seen: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--address", cli_doctor.STARTS_ITS_OWN]) == 0
    assert "only this machine was checked" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_time_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"--timeout-s={text}"]) == 2
    assert "must be a number of seconds above 0" in capsys.readouterr().err
