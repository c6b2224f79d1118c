# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line as a process of its own, with a real engine: what it prints, how it ends, what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.tiny import write_tiny

COMMAND = [sys.executable, "-m", "metrale_ray.cli", "generate"]
TIMEOUT_S = 200.0
LEFT_S = 15.0  # so long after its end, nothing of an engine may be left
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # these leave by themselves, later

pytestmark = pytest.mark.timeout(300)


class Run:
    """One run of the command line; every process that comes from it carries a mark in its environment."""

    def __init__(self, *argv: str, **environment: str) -> None:
        self.mark = f"METRALE-RUN-{uuid.uuid4().hex}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by wait()
        self.process = subprocess.Popen(
            [*COMMAND, *argv],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "RUN_MARK": self.mark, **environment},
            start_new_session=True,  # a signal to it is not one to the tests
        )

    def wait(self) -> subprocess.CompletedProcess[str]:
        try:
            out, _ = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            self.process.kill()
        done = subprocess.CompletedProcess(self.process.args, self.process.returncode, out, self.errors())
        self._errors.close()
        return done

    def errors(self) -> str:
        """What it has written to standard error so far."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode()

    def left(self) -> dict[int, str]:
        """The processes that came from this run and still are there."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    name = (folder / "cmdline").read_text().replace("\0", " ")[:80]
                    if self.mark.encode() in (folder / "environ").read_bytes() and not name.startswith(RAYS_OWN):
                        found[int(folder.name)] = name
                except OSError:
                    continue  # it ended meanwhile, or is not ours
        return found


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.1)
    return True


def check_nothing_left(run: Run) -> None:
    assert until(lambda: not run.left(), LEFT_S), run.left()


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
    prompts = ["--prompt-token-ids", "1,2,3", "--prompt-token-ids", "999999", "--prompt-token-ids", "7"]
    run = Run("--model", str(model), *prompts, "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json")
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
    done = Run("--model", str(tmp_path), "--prompt", "a").wait()
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.ray
def test_an_engine_that_ends_has_its_own_exit_code_and_names_rank_and_reason(model: Path, tmp_path: Path) -> None:
    flags = with_faults(tmp_path, "rank: 1, phase: before, kind: kill, cmd: decode")
    run = Run("--model", str(model), "--ep-size", "2", "--prompt-token-ids", "1,2", *flags)
    done = run.wait()
    assert done.returncode == 4, done.stderr
    assert "error: rank 1" in done.stderr
    assert done.stdout == ""
    check_nothing_left(run)


@pytest.mark.ray
def test_more_ranks_than_the_machine_has_cores_are_refused_at_once(model: Path) -> None:
    started = time.monotonic()
    run = Run("--model", str(model), "--ep-size", "1000", "--prompt-token-ids", "1,2")
    done = run.wait()
    assert done.returncode == 3, done.stderr
    assert "error: 1000 ranks with 1 CPU each" in done.stderr
    assert "Missing:" in done.stderr
    assert time.monotonic() - started < 60
    check_nothing_left(run)


@pytest.mark.ray
@pytest.mark.parametrize("when", ["starting", "running"])
def test_an_interrupt_ends_everything(model: Path, tmp_path: Path, when: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [n, 2]}) for n in range(300)))
    long = ["--prompts-file", str(prompts), "--max-tokens", "200", "--ignore-eos", "--num-cpus-per-rank", "0.5"]
    run = Run("--model", str(model), "--ep-size", "2", *long)
    if when == "starting":
        seen = until(lambda: any(name.startswith("ray::") for name in run.left().values()), 60)
    else:
        seen = until(lambda: "of 300 prompts" in run.errors(), 90)
    assert seen, (run.errors(), run.left())
    run.process.send_signal(signal.SIGINT)
    done = run.wait()
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    check_nothing_left(run)


@pytest.fixture
def other_ray(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a Ray that was started on its own, with a token, and the environment that lets one in."""
    token = tmp_path / "token"
    token.write_text(uuid.uuid4().hex)
    entry = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--head", "--block", "--num-cpus=4", "--port=0", "--include-dashboard=false"]
    command.append(f"--temp-dir=/tmp/mr-{uuid.uuid4().hex[:6]}")  # short: sockets have a limit
    log = (tmp_path / "ray.log").open("w+")
    head = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **entry}, start_new_session=True)

    def address() -> str:
        text = (tmp_path / "ray.log").read_text()
        return text.split("--address='", 1)[1].split("'", 1)[0] if "--address='" in text else ""

    try:
        assert until(lambda: bool(address()) or head.poll() is not None, 60)
        assert head.poll() is None, (tmp_path / "ray.log").read_text()
        yield address(), entry
    finally:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        log.close()


@pytest.mark.ray
@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_ray_that_runs_already_is_used_and_left_running(
    model: Path, other_ray: tuple[str, dict[str, str]], by: str
) -> None:
    address, entry = other_ray
    where = ["--address", address] if by == "flag" else []
    environment = entry if by == "flag" else {**entry, "RAY_ADDRESS": address}
    for _ in range(2):  # the second start finds nothing of the first in its way
        run = Run("--model", str(model), "--ep-size", "2", "--prompt-token-ids", "1,2", "--json", *where, **environment)
        done = run.wait()
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["token_ids"]) > 0
        check_nothing_left(run)
