# SPDX-License-Identifier: MIT OR Apache-2.0
"""examples/ray_data.py as its user runs it, and Ray Data over one engine that runs, up to that engine's end."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import ray

from metrale_ray import LLM, SamplingParams, attach
from metrale_ray.errors import MetraleError, UserError
from metrale_ray.ray_data import generate
from metrale_ray.serve.text import load_tokenizer
from tests.service_rig import write_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_data.py"
COUNT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
RUN_S = 240.0

# Of Ray Data's own context, which sets a setting that it has deprecated.
pytestmark = [pytest.mark.timeout(500), pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_model(tmp_path_factory.mktemp("succ"))


def run(*flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_its_mistakes_are_one_line_each_and_start_nothing(tmp_path: Path) -> None:
    done = run(tmp_path / "prompts.jsonl", tmp_path, "--model", "m")
    assert done.returncode == UserError.exit_code
    assert done.stderr == f"error: the output {tmp_path} is there already; give a folder that is not, or remove it\n"


@pytest.mark.parametrize(
    ("names", "kind"),
    [(["a.jsonl", "more/b.json"], "json"), (["a.parquet", "_SUCCESS", ".a.parquet.crc"], "parquet")],
)
def test_a_folder_is_read_by_the_kind_of_its_files(
    names: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = runpy.run_path(str(EXAMPLE))["read"]
    played = SimpleNamespace(read_json=lambda path, **_: ("json", path), read_parquet=lambda path: ("parquet", path))
    monkeypatch.setitem(read.__globals__, "ray", SimpleNamespace(data=played))
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert read(str(tmp_path)) == (kind, str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"give all \.jsonl, or all \.parquet"):
        read(str(tmp_path))


def test_an_input_that_is_not_there_is_told_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setitem(main.__globals__, "open_engine", pytest.fail)
    monkeypatch.setitem(main.__globals__, "keep_tracebacks_in_files", lambda: None)
    missing = tmp_path / "none.jsonl"
    monkeypatch.setattr(sys, "argv", ["ray_data.py", str(missing), str(tmp_path / "answers"), "--model", "m"])
    assert main() == UserError.exit_code
    message = f"error: the input {missing} is not there; give a file or a folder of JSON lines or Parquet\n"
    assert capsys.readouterr().err == message


def of_a_task(cause: Exception) -> Exception:
    """The error of a task on another node, as Ray raises it here."""
    raised: Exception = ray.exceptions.RayTaskError("read", "Traceback\n  File", cause).as_instanceof_cause()
    return raised


def of_an_actor(line: str) -> Exception:
    """What a map actor raised, of which Ray keeps the text alone."""
    cause = ray.exceptions.UserCodeException("UDF failed to process a data block.\nMore.")
    raised: Exception = ray.exceptions.RayTaskError("map", f"Traceback\n  File\n{line}\n\nmore", cause)
    return raised.as_instanceof_cause()  # type: ignore[attr-defined,no-any-return]


FAILURES = {
    "no json": (
        of_a_task(json.JSONDecodeError("Extra data", "{}{}", 2)),
        2,
        "JSONDecodeError: Extra data: .*one object",
    ),
    "no object": (of_a_task(AssertionError()), 2, "it failed: AssertionError. Each line"),
    "no Parquet": (pyarrow.ArrowInvalid("Parquet magic bytes"), 2, "ArrowInvalid: Parquet magic bytes.*whole"),
    "gone there": (of_a_task(FileNotFoundError(2, "No such file", "/a")), 3, "FileNotFoundError: .*'/a'. Every node"),
    "forbidden here": (PermissionError(13, "Permission denied", "/a"), 3, "PermissionError: .*rights"),
    "a column": (of_an_actor("metrale_ray.errors.UserError: there is no column 'q'"), 2, "^there is no column 'q'$"),
    "the end": (of_an_actor("metrale_ray.errors.EngineDead: rank 1 is gone"), 4, "^rank 1 is gone$"),
    "a rank": (of_an_actor("metrale_ray.errors.LinkLost: no answer"), 3, "^no answer$"),
    "another": (of_an_actor("KeyError: 5"), 3, "UserCodeException: UDF failed to process a data block.*log files"),
    "a node": (
        ray.exceptions.NodeDiedError("the node is gone\nmore"),
        3,
        "NodeDiedError: the node is gone.*ray status",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_in_ray_data_is_one_line_with_its_cause_and_what_to_do(name: str) -> None:
    failure, exit_code, message = FAILURES[name]
    told = runpy.run_path(str(EXAMPLE))["told"]
    with pytest.raises(MetraleError, match=message) as raised, told("it failed"):
        raise failure
    assert raised.value.exit_code == exit_code
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((EXAMPLE.parent / "prompts.jsonl").read_text(), "could not be read: JSONDecodeError: .*one object"),
        ('{"q": "one"}\n', "there is no column 'prompt'; the dataset has 'q'. Name .* by --column"),
    ],
)
def test_an_input_of_another_kind_is_one_line_and_no_traceback(
    model: Path, tmp_path: Path, lines: str, message: str
) -> None:
    (tmp_path / "questions.jsonl").write_text(lines)
    flags = ("--model", model, "--ep-size", 2, "--num-cpus-per-rank", 0.5)
    done = run(tmp_path / "questions.jsonl", tmp_path / "answers", *flags)
    assert done.returncode == UserError.exit_code, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(message, line), line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "answers").exists()


@pytest.mark.ray
@pytest.mark.clusters
def test_it_answers_a_file_of_json_lines_row_by_row(model: Path, tmp_path: Path) -> None:
    prompts = ["one", "two", "x" * 5000]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": number, "q": prompt}) + "\n" for number, prompt in enumerate(prompts))
    )
    flags = ("--model", model, "--ep-size", 2, "--num-cpus-per-rank", 0.5, "--column", "q", "--max-tokens", 3)
    done = run(tmp_path / "prompts.jsonl", tmp_path / "answers", *flags)
    assert done.returncode == 1, done.stderr
    assert "3 rows answered into" in done.stdout
    assert "1 of them with an error" in done.stdout
    rows = pyarrow.parquet.read_table(tmp_path / "answers").to_pylist()
    assert [row["q"] for row in rows] == prompts
    assert [row["error_code"] for row in rows] == [None, None, "context_length_exceeded"]
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    last = tokenizer.encode("one")[-1]
    assert rows[0]["text"] == tokenizer.inner.decode([last + 1, last + 2, last + 3])


@pytest.fixture
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.nightly
def test_map_actors_share_the_engine_keep_the_order_and_are_told_of_its_end(model: Path, local_ray: None) -> None:
    import ray.data

    prompts = [[first, first + 1] for first in range(1, 301)]
    items = ray.data.from_items([{"prompt": prompt} for prompt in prompts], override_num_blocks=7)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 4000, "name": "shared"}
    with LLM(str(model), ep_size=2, num_cpus_per_rank=1, **settings) as llm, attach("shared") as guest:
        rows = generate(items, guest, params=COUNT, concurrency=2, batch_size=16).take_all()
        assert [list(row["prompt"]) for row in rows] == prompts
        texts = [output.outputs[0].text for output in llm.generate(prompts[:9], COUNT, progress=False)]
        assert [row["text"] for row in rows[:9]] == texts
        assert {row["error"] for row in rows} == {None}
        endless = generate(items, "shared", params=SamplingParams(max_tokens=3900, ignore_eos=True))
        answers = iter(endless.iter_rows())
        ranks = llm.stats()["ranks"]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayError, match="EngineDead"):
            next(answers)
    with (
        LLM(str(model), ep_size=2, num_cpus_per_rank=1.5, **settings) as llm,
        pytest.raises(UserError, match="the most is 0 CPU outside of what is reserved for engine 'shared'"),
    ):
        generate(items, llm)
