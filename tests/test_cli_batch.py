# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray batch`: its flags, what it tells, its exit codes; and as a process that is killed and goes on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from metrale_ray import cli, cli_batch
from metrale_ray.cli_batch import BATCH_LIMIT_FLAGS
from metrale_ray.cli_serve import MODEL_FLAGS
from metrale_ray.config import EngineConfig
from metrale_ray.errors import EngineDead
from tests.batch.rig import NAME, RigEngine, by_id, completion, read_lines, rig_engine, write_lines
from tests.processes import Run, check_nothing_left, until
from tests.service_rig import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RigEngine]:
    with rig_engine(model) as engine:
        yield engine


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [completion(f"id-{n}", first=n) for n in range(1, 4)])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def batch(engine: RigEngine | BaseException, *argv: object) -> tuple[int, list[EngineConfig]]:
    """The exit code, and with which settings the engine was opened."""
    asked = []

    @contextmanager
    def opened(config: EngineConfig) -> Iterator[RigEngine]:
        asked.append(config)
        if isinstance(engine, BaseException):
            raise engine
        yield engine

    code = cli.main(["batch", *map(str, argv)], open_llm=cast(Any, opened))
    return code, asked


def flags(engine: RigEngine) -> list[str]:
    return ["--model", str(engine.model_path), "--served-model-name", NAME]


def test_it_answers_tells_a_summary_and_asks_nothing_the_second_time(
    engine: RigEngine, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (config,) = batch(engine, source, output, *flags(engine), "--ep-size", 2, "--seed", 7)
    assert code == 0
    assert (config.model, config.ep_size, config.seed) == (str(engine.model_path), 2, 7)
    assert by_id(output).keys() == {"id-1", "id-2", "id-3"}
    told = capsys.readouterr()
    assert told.out == ""
    first, last = told.err.splitlines()
    assert first == "0 of 3 requests, 0 tokens/s"
    assert last.startswith("3 requests, 0 errors; 3 tokens in, 12 out in ")
    assert batch(engine, source, output, *flags(engine)) == (0, [])
    told = capsys.readouterr()
    assert told.err.splitlines()[0] == "3 of 3 requests are answered already"
    assert told.err.splitlines()[1].startswith("3 requests (3 of them before), 0 errors")


def test_errors_have_an_exit_code_and_are_asked_again_with_a_flag(
    engine: RigEngine, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = source.read_text()
    write_lines(source, [completion("id-1", max_tokens=-1), "{", completion("id-3")])
    code, _ = batch(engine, source, output, *flags(engine))
    assert code == 1
    told = capsys.readouterr().err
    assert told.startswith("warning: line 2 of INPUT is no request: the line is no JSON that can be used")
    assert "3 requests, 2 errors" in told
    source.write_text(right)
    code, _ = batch(engine, source, output, *flags(engine), "--retry-errors")
    assert code == 0
    assert by_id(output).keys() == {"id-1", "id-2", "id-3"}


def test_a_file_of_serve_is_taken_as_it_is_and_flags_win(
    engine: RigEngine, source: Path, output: Path, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    settings = f"model: {engine.model_path}\nserved-model-name: other\nport: 9000\napi-key-file: /nowhere\nmax-n: 2\n"
    file.write_text(settings + "ep-size: 2\n")
    write_lines(source, [completion("a"), completion("b", n=3), completion("c", best_of=3, frobnicate=1)])
    code, (config,) = batch(
        engine, source, output, "--config", file, "--served-model-name", NAME, "--strict", "--max-best-of", 3
    )
    assert (code, config.ep_size) == (1, 2)
    found = {name: line["response"]["body"].get("error", {}).get("code") for name, line in by_id(output).items()}
    assert found == {"a": None, "b": "limit_exceeded", "c": "unknown_field"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "no model given"),
        (["--model", "m", "--concurrency", "0"], "argument --concurrency: '0' must be an integer above 0"),
        (["--model", "m", "--concurrency", "99999"], "concurrency is 99999; it must be an integer from 1 to"),
        (["--model", "m", "--max-n", "65"], "max_n is 65; the engine allows at most 64"),
        (["--model", "m", "--tool-parser", "gemma"], "tool_parser is 'gemma'"),
        (["--model", "m", "--port", "1"], "unrecognized arguments: --port 1"),
        (["--model", "m", "--ep-size", "0"], "ep_size is 0"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_and_nothing_is_touched(
    more: list[str], message: str, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(AssertionError("it is opened"), source, output, *more) == (2, [])
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not output.exists()


def test_files_are_told_before_an_engine_starts(source: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = AssertionError("it is opened")
    for argv, message in [
        ((source, source), "INPUT and OUTPUT are the same file"),
        ((output, source), "cannot read INPUT"),
        ((source, output / "out.jsonl"), "the folder of OUTPUT"),
    ]:
        assert batch(nothing, *argv, "--model", "m") == (2, [])
        assert capsys.readouterr().err.startswith(f"error: {message}")
    assert batch(nothing, source) == (2, [])
    assert "the following arguments are required: OUTPUT" in capsys.readouterr().err


def test_a_large_input_is_told_of_before_it_is_read(
    engine: RigEngine,
    source: Path,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli_batch, "LARGE_BYTES", 10)
    batch(engine, source, output, *flags(engine))
    assert capsys.readouterr().err.startswith(f"reading {source}\n")


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [(KeyboardInterrupt(), 130, "interrupted"), (EngineDead("rank 1 has gone", rank=1), 4, "error: rank 1 has gone")],
)
def test_an_early_end_has_an_exit_code_of_its_own(
    ending: BaseException, code: int, last: str, source: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = batch(ending, source, output, "--model", "m")
    assert found == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == last
    if code == 130:
        assert lines[-2] == f"0 of 3 requests are answered in {output}; the same command goes on from there"
    assert not output.exists()


def test_what_the_extra_brings_is_named_where_it_is_missing(
    source: Path, output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_batch, "NEEDED", ("nothing_of_this_name",))
    assert batch(AssertionError("it is opened"), source, output, "--model", "m") == (2, [])
    assert capsys.readouterr().err == (
        "error: batch needs nothing_of_this_name; install them: pip install 'metrale-ray[serve]'\n"
    )


def test_the_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["batch", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in (*BATCH_LIMIT_FLAGS, *MODEL_FLAGS):
        assert flag.names[0] in text
    assert "requests in flight (default: twice --max-batch-size)" in text
    assert "--body-timeout-s" not in text


# As a process of its own, with ranks on a Ray

NUM_REQUESTS = 60


@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_in_the_middle_goes_on_and_answers_each_request_once(model: Path, tmp_path: Path) -> None:
    requests = [completion(f"id-{n}", first=n, max_tokens=200, return_token_ids=True) for n in range(NUM_REQUESTS)]
    source, output = write_lines(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    argv = [sys.executable, "-m", "metrale_ray", "batch", str(source), str(output), "--model", str(model)]
    argv += ["--served-model-name", NAME, "--ep-size", "2", "--dtype", "float32", "--concurrency", "4"]
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)):
        num_before = num_lines(output)
        run = Run(argv, OMP_NUM_THREADS="1")
        assert until(lambda before=num_before: num_lines(output) > before, 200), run.errors()
        os.kill(run.process.pid, number)
        done = run.wait()
        assert done.returncode == code, done.stderr
        if number != signal.SIGKILL:
            assert "the same command goes on from there" in done.stderr
        check_nothing_left(run)
        assert num_before < num_lines(output) < NUM_REQUESTS
    done = Run(argv, OMP_NUM_THREADS="1").wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert f"{NUM_REQUESTS} requests (" in done.stderr
    lines = by_id(output)
    assert lines.keys() == {f"id-{n}" for n in range(NUM_REQUESTS)}
    assert len(read_lines(output)) == NUM_REQUESTS
    for n in range(NUM_REQUESTS):
        (choice,) = lines[f"id-{n}"]["response"]["body"]["choices"]
        assert choice["token_ids"] == [(n + 1 + place) % 320 for place in range(200)]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
