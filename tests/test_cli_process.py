# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line as a process of its own, with a real engine: its standard output holds answers and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.tiny import write_tiny

COMMAND = [sys.executable, "-m", "metrale_ray.cli", "generate"]
TIMEOUT_S = 300.0


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.ray
@pytest.mark.timeout(TIMEOUT_S)
def test_answers_are_lines_of_json_and_a_request_that_is_refused_fails_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path, "mixtral")
    prompts = ["--prompt-token-ids", "1,2,3", "--prompt-token-ids", "999999", "--prompt-token-ids", "7"]
    done = run("--model", str(tmp_path), *prompts, "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json")
    assert done.returncode == 1, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"]
    assert [line["usage"]["completion_tokens"] for line in lines] == [4, 0, 4]
    assert lines[1]["error"]
    assert f"error: prompt 1: {lines[1]['error']}" in done.stderr


def test_a_checkpoint_that_is_not_there_is_one_line_and_no_engine_is_started(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path), "--prompt", "a")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1
