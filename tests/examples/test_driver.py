# SPDX-License-Identifier: MIT OR Apache-2.0
"""examples/driver.py: a file of requests answered as a job would, over an engine in this process, and over Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from examples import driver
from metrale_ray.batch.line import BatchRequest, read_line
from metrale_ray.errors import EngineDead, StartError
from metrale_ray.serve.limits import ServeLimits
from tests.batch.rig import RigEngine, completion, read_lines, rig_engine, write_lines
from tests.service_rig import write_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_model(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RigEngine]:
    with rig_engine(model) as opened:
        yield opened


class Open:
    """Stands in for `open_engine`: gives the rig's engine, or fails, and counts."""

    def __init__(self, engine: RigEngine | None = None, error: BaseException | None = None) -> None:
        self.engine, self.error, self.num_opened = engine, error, 0

    def __call__(self, flags: Any) -> AbstractContextManager[Any]:
        self.num_opened += 1
        return self

    def __enter__(self) -> RigEngine | None:
        if self.error is not None:
            raise self.error
        return self.engine

    def __exit__(self, *error: object) -> None:
        return


@pytest.fixture(autouse=True)
def _signals_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "interrupt_at_sigterm", lambda: None)


def run(folder: Path, model: Path, *more: str) -> int:
    files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    return driver.main(["--model", str(model), "--ep-size", "2", "--served-model-name", "succ", *files, *more])


def test_every_request_has_one_line_and_the_same_command_asks_nothing_again(
    engine: RigEngine,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened = Open(engine)
    monkeypatch.setattr(driver, "open_engine", opened)
    write_lines(tmp_path / "in.jsonl", [completion("a", 3), completion("b", 9)])
    assert run(tmp_path, model) == 0
    answers = {line["custom_id"]: line["response"]["body"] for line in read_lines(tmp_path / "out.jsonl")}
    assert {name: body["usage"]["completion_tokens"] for name, body in answers.items()} == {"a": 4, "b": 4}
    assert "2 requests, 0 errors" in capsys.readouterr().err
    assert run(tmp_path, model) == 0
    assert opened.num_opened == 1
    assert len(read_lines(tmp_path / "out.jsonl")) == 2


def test_a_request_that_is_wrong_is_exit_code_1_and_the_others_are_answered(
    engine: RigEngine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "open_engine", Open(engine))
    write_lines(tmp_path / "in.jsonl", [completion("a", temperature=-1), completion("b")])
    assert run(tmp_path, model) == 1
    status = {line["custom_id"]: line["response"]["status_code"] for line in read_lines(tmp_path / "out.jsonl")}
    assert status == {"a": 400, "b": 200}


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (StartError("the nodes differ:\nray: ..."), 3, "error: the nodes differ:"),
        (EngineDead("rank 1 ended", rank=1), 4, "error: rank 1 ended"),
        (KeyboardInterrupt(), 130, "stopped; the same command goes on from there"),
    ],
)
def test_whatever_ends_it_early_has_its_exit_code_and_a_line(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    told: str,
) -> None:
    monkeypatch.setattr(driver, "open_engine", Open(error=error))
    write_lines(tmp_path / "in.jsonl", [completion("a")])
    assert run(tmp_path, model) == code
    assert told in capsys.readouterr().err


def test_a_job_that_is_stopped_has_the_exit_code_of_sigterm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "open_engine", Open(error=KeyboardInterrupt()))
    monkeypatch.setattr(driver, "was_terminated", lambda: True)
    write_lines(tmp_path / "in.jsonl", [completion("a")])
    assert run(tmp_path, model) == 143


def test_an_output_that_would_go_with_the_job_is_refused_before_an_engine_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_own = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    jobs_own.mkdir(parents=True)
    monkeypatch.chdir(jobs_own)
    files = ["--input", "in.jsonl", "--output", "answers.jsonl"]
    assert driver.main(["--model", str(model), *files]) == 2
    assert "give a whole path such as /data/answers.jsonl" in capsys.readouterr().err


def test_an_input_that_is_not_there_is_refused_before_an_engine_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Open()
    monkeypatch.setattr(driver, "open_engine", opened)
    assert run(tmp_path, model) == 2
    assert opened.num_opened == 0


def test_flags_that_are_given_are_the_engines_settings(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(driver, "LLM", lambda model, **settings: asked.append((model, settings)))
    required = ["--model", "m", "--input", "i", "--output", "o"]
    driver.open_engine(driver.parser().parse_args(required))
    driver.open_engine(driver.parser().parse_args([*required, "--ep-size", "3", "--num-cpus-per-rank", "0.5"]))
    assert asked == [
        ("m", {"ep_size": 1, "placement": "PACK"}),
        ("m", {"ep_size": 3, "placement": "PACK", "num_cpus_per_rank": 0.5}),
    ]


def test_the_requests_that_come_with_it_are_right() -> None:
    lines = (EXAMPLES / "prompts.jsonl").read_bytes().splitlines(keepends=True)
    read = [read_line(number, line, ServeLimits()) for number, line in enumerate(lines, start=1)]
    assert [type(line) for line in read] == [BatchRequest] * 4
    assert len({json.loads(line)["custom_id"] for line in lines}) == 4


@pytest.mark.ray
@pytest.mark.nightly  # the same over machines of one's own is a job in the tests over hosts
def test_the_script_answers_a_file_over_ranks_on_ray(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", [completion("a", 3), completion("b", 9)])
    assert run(tmp_path, model, "--num-cpus-per-rank", "0.5") == 0
    assert {line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")} == {"a", "b"}
    assert "starting 2 ranks" in capsys.readouterr().err
