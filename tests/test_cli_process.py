# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line as a process of its own, with a real engine: what it prints, how it ends, what is left of it."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.tiny import write_tiny
from tests.processes import OwnRay, Run, check_nothing_left, until

COMMAND = [sys.executable, "-m", "metrale_ray", "generate"]

pytestmark = pytest.mark.timeout(300)


class Cli(Run):
    """One run of `metrale-ray generate`."""

    def __init__(self, *argv: str, **environment: str) -> None:
        super().__init__([*COMMAND, *argv], **environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "mixtral")


def with_faults(folder: Path, *faults: str) -> list[str]:
    """Flags for a configuration file with these faults."""
    file = folder / "faults.yaml"
    file.write_text("faults:\n" + "".join(f"  - {{{fault}}}\n" for fault in faults))
    return ["--config", str(file)]


@pytest.mark.ray
def test_answers_are_lines_of_json_and_a_request_that_is_refused_fails_alone(model: Path) -> None:
    too_long = ",".join(["1"] * 2000)
    prompts = ["--prompt-token-ids", "1,2,3", "--prompt-token-ids", too_long, "--prompt-token-ids", "7"]
    run = Cli("--model", str(model), *prompts, "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json")
    done = run.wait()
    assert done.returncode == 1, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"]
    assert [line["usage"]["completion_tokens"] for line in lines] == [4, 0, 4]
    assert lines[1]["error"]
    assert f"error: prompt 1: {lines[1]['error']}" in done.stderr
    check_nothing_left(run)


def test_a_checkpoint_that_is_not_there_is_one_line_and_no_engine_is_started(tmp_path: Path) -> None:
    done = Cli("--model", str(tmp_path), "--prompt", "a").wait()
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.ray
def test_an_engine_that_ends_has_its_own_exit_code_and_names_rank_and_reason(model: Path, tmp_path: Path) -> None:
    flags = with_faults(tmp_path, "rank: 1, phase: before, kind: kill, cmd: decode")
    run = Cli("--model", str(model), "--ep-size", "2", "--prompt-token-ids", "1,2", *flags)
    done = run.wait()
    assert done.returncode == 4, done.stderr
    assert "error: rank 1" in done.stderr
    assert done.stdout == ""
    check_nothing_left(run)


@pytest.mark.ray
def test_more_ranks_than_the_machine_has_cores_are_refused_at_once(model: Path) -> None:
    started = time.monotonic()
    run = Cli("--model", str(model), "--ep-size", "1000", "--prompt-token-ids", "1,2")
    done = run.wait()
    assert done.returncode == 3, done.stderr
    assert "error: 1000 ranks with 1 CPU each" in done.stderr
    assert "Missing:" in done.stderr
    assert time.monotonic() - started < 60
    check_nothing_left(run)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("when", "how", "code"),
    [
        ("starting", signal.SIGTERM, 143),
        ("running", signal.SIGINT, 130),
        pytest.param("starting", signal.SIGINT, 130, marks=pytest.mark.nightly),
        pytest.param("running", signal.SIGTERM, 143, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupt_or_a_request_to_end_ends_everything(
    model: Path, tmp_path: Path, when: str, how: signal.Signals, code: int
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [n, 2]}) for n in range(300)))
    long = ["--prompts-file", str(prompts), "--max-tokens", "200", "--ignore-eos", "--num-cpus-per-rank", "0.5"]
    run = Cli("--model", str(model), "--ep-size", "2", *long)
    if when == "starting":
        seen = until(lambda: any(name.startswith("ray::") for name in run.left().values()), 60)
    else:
        seen = until(lambda: "of 300 prompts" in run.errors(), 150)
    assert seen, (run.errors(), run.left())
    run.process.send_signal(how)
    done = run.wait()
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == ("interrupted" if code == 130 else "terminated")
    check_nothing_left(run)


@pytest.fixture(scope="module")
def other_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a Ray that was started on its own, with a token, and the environment that lets one in."""
    with OwnRay(tmp_path_factory.mktemp("ray")) as other:
        yield other.address, other.entry


@pytest.mark.ray
@pytest.mark.parametrize(("by", "num_starts"), [("flag", 1), pytest.param("variable", 2, marks=pytest.mark.nightly)])
def test_a_ray_that_runs_already_is_used_and_left_running(
    model: Path, other_ray: tuple[str, dict[str, str]], by: str, num_starts: int
) -> None:
    address, entry = other_ray
    where = ["--address", address] if by == "flag" else []
    environment = entry if by == "flag" else {**entry, "RAY_ADDRESS": address}
    for _ in range(num_starts):  # the second finds nothing of the first in its way
        run = Cli("--model", str(model), "--ep-size", "2", "--prompt-token-ids", "1,2", "--json", *where, **environment)
        done = run.wait()
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["token_ids"]) > 0
        check_nothing_left(run)
