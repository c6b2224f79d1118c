# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from bench.engines import ENGINE_CASES, LLAMA_VARIABLE, VLLM_VARIABLE, EngineCase

CASES = {case.name: case for case in ENGINE_CASES}
MODEL = Path("/checkpoints/small")


def test_names_are_told_apart() -> None:
    assert len(CASES) == len(ENGINE_CASES)


@pytest.mark.parametrize("case", [case for case in ENGINE_CASES if case.variable], ids=lambda case: case.name)
def test_a_peer_without_a_variable_is_left_out_with_its_name(case: EngineCase, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case.variable is not None
    monkeypatch.delenv(case.variable, raising=False)
    assert case.variable in (case.missing() or "")


def test_a_variable_that_names_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, "/nowhere/python")
    assert "/nowhere/python, which is not there" in (CASES["vllm"].missing() or "")


def test_a_setting_of_another_build_leaves_the_case_out() -> None:
    case = EngineCase("new", "new", "ours", settings=(("colour_of_the_experts", "red"),))
    assert case.missing() == "no setting `colour_of_the_experts` in this build"


def test_every_engine_of_this_build_can_be_started() -> None:
    assert CASES["one"].missing() is None


def test_settings_and_ranks_are_on_the_command_line() -> None:
    command = CASES["two-tensor"].command("python", MODEL)
    assert command == ["python", "-m", "bench.cases.ours", str(MODEL), "--ranks", "2", "--set=attention=tensor"]


def test_llama_gets_its_own_python_and_a_file_beside_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LLAMA_VARIABLE, "/environments/llama/bin/python")
    command = CASES["llama-q8"].command("python", MODEL)
    assert command[0] == "/environments/llama/bin/python"
    assert command[-2:] == ["--file", "/checkpoints/small.q8_0.gguf"]


def test_vllm_gets_the_libraries_of_its_environment_and_no_other_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    monkeypatch.setenv(VLLM_VARIABLE, str(tmp_path / "bin" / "python"))
    assert str(tmp_path / "lib" / "libiomp5.so") in CASES["vllm"].environment()["LD_PRELOAD"].split(":")
    assert CASES["one"].environment() == {}
