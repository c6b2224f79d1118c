# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole batches with an engine of two ranks: answers, errors in their lines, going on, and ends that come early."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.batch import BatchOptions, open_batch, run_batch
from metrale_ray.batch.output_file import OutputFile
from metrale_ray.errors import ConfigError, EngineDead, UserError
from tests.batch.rig import NAME, RigEngine, by_id, chat, completion, read_lines, rig_engine, write_lines
from tests.service_rig import serving, write_model

OPTIONS = BatchOptions(served_model_name=NAME, concurrency=8)
RETRY = BatchOptions(served_model_name=NAME, concurrency=8, retry_errors=True)
LONG = {"max_tokens": 3000}
NUM_ENDLESS = 3  # of the four places in a step: one is left for what ends


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RigEngine]:
    with rig_engine(model) as engine:
        yield engine


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def completions(count: int) -> list[dict[str, Any]]:
    return [completion(f"id-{n}", first=n, return_token_ids=True) for n in range(1, count + 1)]


def check_answers(output: Path, count: int) -> None:
    """Each of the completions has its answer, once."""
    lines = by_id(output)
    assert lines.keys() == {f"id-{n}" for n in range(1, count + 1)}
    for n in range(1, count + 1):
        (choice,) = lines[f"id-{n}"]["response"]["body"]["choices"]
        assert choice["token_ids"] == list(range(n + 1, n + 5))


def status_of(line: dict[str, Any]) -> tuple[int, str | None]:
    """The status, and the code of an error."""
    response = line["response"]
    return response["status_code"], response["body"].get("error", {}).get("code")


def test_each_request_has_one_line_with_its_answer(engine: RigEngine, source: Path, output: Path) -> None:
    summary = run_batch(engine, write_lines(source, completions(30)), output, OPTIONS)
    check_answers(output, 30)
    lines = read_lines(output)
    assert {line["response"]["status_code"] for line in lines} == {200}
    assert {line["error"] for line in lines} == {None}
    assert len({line["id"] for line in lines}) == len({line["response"]["request_id"] for line in lines}) == 30
    assert (summary.num_requests, summary.num_errors, summary.num_before) == (30, 0, 0)
    assert (summary.num_prompt_tokens, summary.num_tokens) == (30, 120)


def test_answers_are_those_of_the_service(model: Path, engine: RigEngine, source: Path, output: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    bodies = [
        completion("several", prompt=[[3], [9, 11]], n=2, logprobs=2, echo=True),
        completion("text", prompt="one two", stop=["three"]),
        completion("too long", prompt=[1] * 5000),
        completion("wrong", temperature=-1),
        completion("other", model="gpt-4"),
        chat("chat", logprobs=True, top_logprobs=2),
        chat("form", response_format=schema, max_tokens=20),
        chat("role", messages=[{"role": "robot", "content": "x"}]),
        chat("tools", tools=[{"type": "function", "function": {"name": "look"}}]),
    ]
    run_batch(engine, write_lines(source, bodies), output, OPTIONS)
    lines = by_id(output)
    with serving(model, 2) as rig:
        for asked in bodies:
            told = rig.client.post(asked["url"], json=asked["body"])
            line = lines[asked["custom_id"]]["response"]
            assert line["status_code"] == told.status_code, asked["custom_id"]
            assert without_chance(line["body"]) == without_chance(told.json())
    assert [status_of(lines[name]) for name in ("several", "chat", "form", "other")] == [
        (200, None),
        (200, None),
        (200, None),
        (404, "model_not_found"),
    ]


def without_chance(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_what_is_wrong_with_a_line_is_in_its_line_and_the_others_are_answered(
    engine: RigEngine, source: Path, output: Path
) -> None:
    lines = [
        *completions(3),
        "{",
        completion("id-2"),
        completion("x") | {"url": "/v1/embeddings"},
        completion("streamed", stream=True),
    ]
    with open_batch(write_lines(source, lines), output, OPTIONS) as batch:
        assert len(batch.notes) == 3
        summary = batch.run(engine)
    assert (summary.num_requests, summary.num_errors) == (7, 4)
    found = read_lines(output)
    assert len(found) == 7
    errors = {line["error"]["line"]: (line["custom_id"], line["error"]["code"]) for line in found if line["error"]}
    assert errors == {4: (None, "invalid_json_line"), 5: ("id-2", "duplicate_custom_id"), 6: ("x", "invalid_url")}
    (streamed,) = [line for line in found if line["custom_id"] == "streamed"]
    assert status_of(streamed) == (400, "invalid_request")
    assert run_batch(engine, source, output, OPTIONS).num_errors == 4
    assert read_lines(output) == found


def test_a_batch_without_a_request_needs_no_engine(source: Path, output: Path) -> None:
    write_lines(source, ["{", completion("a") | {"method": "GET"}])
    summary = run_batch(never_opened, source, output, OPTIONS)
    assert (summary.num_requests, summary.num_errors) == (2, 2)
    assert [line["custom_id"] for line in read_lines(output)] == [None, "a"]
    assert run_batch(never_opened, source, output, OPTIONS).num_before == 2


@contextmanager
def never_opened() -> Iterator[RigEngine]:
    raise AssertionError("an engine is started for nothing")
    yield


def test_an_engine_is_opened_once_there_is_something_to_ask_and_closed_after_it(
    engine: RigEngine, source: Path, output: Path
) -> None:
    done = []

    @contextmanager
    def opened() -> Iterator[RigEngine]:
        done.append("opened")
        yield engine
        done.append("closed")

    with pytest.raises(UserError, match="cannot read INPUT"):
        run_batch(opened, source, output, OPTIONS)
    assert done == []
    run_batch(opened, write_lines(source, completions(2)), output, OPTIONS)
    assert done == ["opened", "closed"]
    check_answers(output, 2)


def test_a_run_goes_on_from_wherever_another_was_killed(
    engine: RigEngine, source: Path, output: Path, scale: int
) -> None:
    write_lines(source, completions(6))
    run_batch(engine, source, output, OPTIONS)
    whole = output.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // (12 * scale))):
        output.write_bytes(whole[:size])
        num_kept = whole[:size].count(b"\n")
        summary = run_batch(engine, source, output, OPTIONS)
        assert summary.num_before in (num_kept, num_kept + 1)  # all but the end of a line may be there
        assert output.read_bytes().startswith(b"".join(whole.splitlines(keepends=True)[:num_kept]))
        check_answers(output, 6)


def test_errors_are_asked_again_only_when_that_is_wanted(engine: RigEngine, source: Path, output: Path) -> None:
    wrong = completion("id-2", first=2, return_token_ids=True, n=10_000)
    write_lines(source, [completions(1)[0], wrong, "{"])
    assert run_batch(engine, source, output, OPTIONS).num_errors == 2
    write_lines(source, completions(3))
    assert run_batch(engine, source, output, RETRY).num_errors == 0
    check_answers(output, 3)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int, act: Callable[[], None]) -> None:
    """Let `act` run when this many lines have been written."""
    append, lines = OutputFile.append, list[bytes]()

    def counted(self: OutputFile, line: bytes) -> None:
        append(self, line)
        lines.append(line)
        if len(lines) == count:
            act()

    monkeypatch.setattr(OutputFile, "append", counted)


def test_an_interrupt_leaves_whole_lines_and_no_work_in_the_engine(
    engine: RigEngine, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = [completion(f"long-{n}", **LONG) for n in range(NUM_ENDLESS)]
    write_lines(source, [*endless, *completions(5)])
    interrupt_after(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with open_batch(source, output, OPTIONS) as batch:
        with pytest.raises(KeyboardInterrupt):
            batch.run(engine)
        told = batch.how_to_go_on
    num_done = len(read_lines(output))
    assert 2 <= num_done <= 5
    assert told.startswith(f"{num_done} of 8 requests are answered in {output}")
    assert engine.is_idle()
    monkeypatch.undo()
    write_lines(source, [*(completion(f"long-{n}") for n in range(NUM_ENDLESS)), *completions(5)])
    assert run_batch(engine, source, output, OPTIONS).num_before == num_done
    assert len(by_id(output)) == 8


def test_an_engine_that_ends_ends_the_batch_and_what_is_not_answered_is_not_written(
    model: Path, engine: RigEngine, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = [completion(f"long-{n}", **LONG) for n in range(NUM_ENDLESS)]
    write_lines(source, [*endless, *completions(5)])
    with rig_engine(model) as mortal, monkeypatch.context() as patch:
        interrupt_after(patch, 2, lambda: mortal.client.die("rank 1 has gone", 1))
        with pytest.raises(EngineDead) as caught:
            run_batch(mortal, source, output, OPTIONS)
    lines = read_lines(output)
    assert {status_of(line) for line in lines} == {(200, None)}
    how = f"{len(lines)} of 8 requests are answered in {output}; the same command goes on from there"
    assert caught.value.message == f"rank 1 has gone; {how}"
    write_lines(source, [*(completion(f"long-{n}") for n in range(NUM_ENDLESS)), *completions(5)])
    assert run_batch(engine, source, output, OPTIONS).num_before == len(lines)
    assert len(by_id(output)) == 8


def test_a_queue_that_is_full_reaches_no_line(model: Path, source: Path, output: Path) -> None:
    with rig_engine(model, 1, max_queue_len=2, max_batch_size=2) as small:
        write_lines(source, [completion(f"id-{n}", first=n, n=2) for n in range(8)])
        summary = run_batch(small, source, output, BatchOptions(served_model_name=NAME, concurrency=8))
        assert small.stats()["rejected"].get("queue_full", 0) > 0
    assert (summary.num_errors, len(by_id(output))) == (0, 8)


def test_by_default_the_model_is_its_folder_and_twice_a_step_is_in_flight(
    engine: RigEngine, source: Path, output: Path
) -> None:
    named = completion("named") | {"body": {"model": str(engine.model_path), "prompt": [3], "max_tokens": 1}}
    nameless = completion("nameless") | {"body": {"prompt": [3], "max_tokens": 1}}
    assert run_batch(engine, write_lines(source, [named, nameless]), output).num_errors == 0
    lines = by_id(output)
    assert {line["response"]["body"]["model"] for line in lines.values()} == {str(engine.model_path)}


def test_files_that_cannot_be_used_are_told_before_anything_is_asked(source: Path, output: Path) -> None:
    write_lines(source, completions(2))
    with pytest.raises(UserError, match="INPUT and OUTPUT are the same file"):
        run_batch(never_opened, source, source, OPTIONS)
    output.symlink_to(source)
    with pytest.raises(UserError, match="INPUT and OUTPUT are the same file"):
        run_batch(never_opened, source, output, OPTIONS)
    output.unlink()
    output.write_text(json.dumps(completion("a")) + "\n")
    with pytest.raises(UserError, match="holds something else"):
        run_batch(never_opened, source, output, OPTIONS)
    write_lines(source, [""])
    output.unlink()
    with pytest.raises(UserError, match="is empty"):
        run_batch(never_opened, source, output, OPTIONS)
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0; it must be an integer from 1"),
        ({"concurrency": 2.5}, "concurrency is 2.5"),
        ({"concurrency": True}, "concurrency is True"),
        ({"retry_errors": "yes"}, "retry_errors is 'yes'; it must be true or false"),
        ({"tool_parser": "gemma"}, "tool_parser is 'gemma'"),
        ({"chat_template": "nowhere.jinja"}, "chat_template is 'nowhere.jinja', which is no file"),
        ({"served_model_name": ("a", "")}, "served_model_name is ''"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchOptions(**options)
    assert caught.value.message.startswith(message)
