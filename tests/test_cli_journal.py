# SPDX-License-Identifier: MIT OR Apache-2.0
"""`replay` and `bisect` on journals on disk: what they write, their exit codes, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from metrale_ray import cli_journal
from metrale_ray.cli import main
from metrale_ray.protocol.journal.records import Record, Sampled
from metrale_ray.replay.comparison import Difference
from metrale_ray.replay.parting import Parting
from tests.fixtures.tiny import write_tiny
from tests.harness import GREEDY, Driver
from tests.replay.journals import DRAWN, Recorded, record, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe", num_hidden_layers=1)


@pytest.fixture(scope="module")
def recorded(model: Path) -> Recorded:
    return record(model, _script, ep_size=2)


def _script(driver: Driver) -> None:
    driver.submit([1, 2, 3, 4, 5], DRAWN)
    driver.submit([6, 7], GREEDY)
    driver.run()


@pytest.fixture(scope="module")
def journal(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("journal"), recorded.records)


@pytest.fixture(scope="module")
def wrong(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one other token."""
    records: list[Record] = list(recorded.records)
    index = next(i for i, each in enumerate(records) if isinstance(each, Sampled))
    sampled = records[index]
    assert isinstance(sampled, Sampled)
    token_id = sampled.tokens[0].token_id
    assert token_id is not None
    records[index] = dataclasses.replace(sampled, tokens=(sampled.tokens[0]._replace(token_id=token_id ^ 1),))
    return write(tmp_path_factory.mktemp("wrong"), records)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "METRALE_LOG_LEVEL", "METRALE_EP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> str:
    """What a command with these arguments writes to standard output."""
    assert main([str(each) for each in argv]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def run_json(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> dict[str, Any]:
    out = run(capsys, code, *argv, "--json")
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(each) for each in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_a_journal_that_gives_the_same_ends_with_0(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [" ".join(line.split()) for line in run(capsys, 0, "replay", journal).splitlines()]
    assert "recorded 2 ranks, protocol v2, epoch 1" in lines
    assert lines[-1] == "result the same"
    assert any(re.fullmatch(r"ran \d+ commands, \d+ tokens of 4 sequences", line) for line in lines)
    assert any(re.fullmatch(r"logits (\d+) of \1 to the last bit, largest difference 0", line) for line in lines)


def test_another_number_of_ranks_is_said_to_be_no_matter_of_bits(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(capsys, 0, "replay", journal, "--ep-size", 1)
    assert "ep_size: recorded '2', here '1'" in out
    assert "tokens and digests are compared" in out


def test_the_objects_keys_are_those_of_the_docstring(
    journal: Path, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = set(re.findall(r"`(\w+)`", cli_journal.__doc__ or ""))
    same, differs = run_json(capsys, 0, "replay", journal), run_json(capsys, 1, "replay", wrong)
    parts = run_json(capsys, 1, "bisect", journal, wrong)
    assert same.keys() | differs["difference"].keys() | parts.keys() | parts["parting"].keys() <= named
    assert same["same"] is True
    assert same["difference"] is None
    assert same["values"] == same["exact_values"] == 5 * same["tokens"] > 0
    assert (same["recorded_ranks"], same["ranks"], same["kernel_differences"]) == (2, 2, [])


def test_the_first_difference_is_told_and_ends_with_1(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, 1, "replay", wrong)
    assert found["same"] is False
    difference = found["difference"]
    assert difference["field"] == "the token"
    assert int(difference["recorded"]) ^ 1 == int(difference["found"])
    line = run(capsys, 1, "replay", wrong).splitlines()[-1]
    shown = (
        f"differs at command {difference['seq']} ({difference['command']}): request {difference['request']}: the token"
    )
    assert shown in line


def test_a_moved_checkpoint_is_named_and_another_one_refused(
    journal: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, other = tmp_path / "moved", tmp_path / "other"
    moved.symlink_to(model)
    assert run_json(capsys, 0, "replay", journal, "--model", moved)["model"] == str(moved)
    write_tiny(other, "qwen3_moe", seed=9, num_hidden_layers=1)
    assert "allow another one with --any-checkpoint" in refused(capsys, "replay", journal, "--model", other)
    found = run_json(capsys, 1, "replay", journal, "--model", other, "--any-checkpoint")
    assert found["file_differences"]


def test_what_cannot_be_run_is_refused_with_2(
    recorded: Recorded, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redacted = write(tmp_path / "redacted", recorded.records, redact=True)
    assert "leaves prompts, tokens and frames out" in refused(capsys, "replay", redacted)
    assert "no-such" in refused(capsys, "replay", tmp_path / "no-such")
    assert "device is 'tpu'" in refused(capsys, "replay", journal, "--device", "tpu")
    assert "integer of at least 1" in refused(capsys, "replay", journal, "--ep-size", 0)


def test_a_torn_end_is_told(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "torn", recorded.records[:-1])
    segment = next(folder.rglob("*.journal"))
    segment.write_bytes(segment.read_bytes()[:-3])
    remarks = run_json(capsys, 0, "replay", folder)["remarks"]
    assert remarks[-1].startswith("the last record of the journal is torn")


def test_two_journals_part_where_their_tokens_do(
    journal: Path, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, 0, "bisect", journal, journal).splitlines()[-1].split() == [
        "result",
        *["the", "same", "within", "0.001"],
    ]
    found = run_json(capsys, 1, "bisect", journal, wrong)
    assert found["parting"]["field"] == "the token"
    assert f"part at command {found['parting']['seq']}" in run(capsys, 1, "bisect", journal, wrong)


def test_one_journal_is_run_under_two_configurations(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, 0, "bisect", journal, "--a", "ep-size=1", "--b", "ep-size=3,dtype=float32")
    assert found["same"] is True
    assert found["largest_gap"] < 1e-4
    parts = run_json(capsys, 1, "bisect", journal, "--b", "dtype=bfloat16", "--tolerance", "1e-4")
    assert parts["parting"]["field"].startswith("the logit of token")
    assert parts["tolerance"] == 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "these are the same: say what differs"),
        (["--a", "ep-size=1", "--b", "ep-size=1"], "these are the same"),
        (["--a", "seed=1"], "each name once, of ep-size, device, dtype, quantization, kernels, attention"),
        (["--a", "ep-size"], "must be NAME=VALUE"),
        (["--a", "ep-size=1,ep-size=2"], "each name once"),
        (["--a", "ep-size=x"], "ep_size is 'x'; it must be an integer"),
        (["--tolerance", "-1"], "must be a number of at least 0"),
        (["--tolerance", "x"], "must be a number of at least 0"),
    ],
)
def test_configurations_that_cannot_be_compared_are_refused(
    journal: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refused(capsys, "bisect", journal, *flags)


def test_settings_of_runs_make_no_sense_for_two_journals(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--a", "ep-size=1"], ["--model", "x"], ["--any-checkpoint"]):
        assert f"{flags[0]} is for running one journal twice" in refused(capsys, "bisect", journal, journal, *flags)


def test_differences_and_partings_are_said_in_words() -> None:
    assert str(Difference(4, 2, "digest", 1, None, "00", "01")) == (
        "rank 1: the digest of what was settled before: recorded 00, found 01"
    )
    assert str(Parting(4, 2, "the start", 7, "3", "4")) == "request 7: the start: A has 3, B has 4"
