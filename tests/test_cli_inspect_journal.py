# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `inspect-journal` writes of journals and dumps: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from metrale_ray import cli_inspect_journal
from metrale_ray.cli import main
from metrale_ray.config import FaultSpec
from metrale_ray.protocol.journal.dump import write_dump
from metrale_ray.protocol.journal.records import Admitted
from tests.fixtures.tiny import write_tiny
from tests.replay.journals import Recorded, busy_script, record, write


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """One request fails."""
    model = write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe", num_hidden_layers=1)
    return record(model, busy_script, ep_size=2, faults=(FaultSpec(1, "reply", first_token=7, blame=True),))


@pytest.fixture(scope="module")
def journal(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("journal"), recorded.records)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["inspect-journal", *map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def run_json(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    out = run(capsys, *argv, "--json")
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_tables_show_commands_sequences_failures_and_ranks(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(capsys, journal)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("engine 2 ranks, protocol v2, ") for line in lines)
    assert re.search(r"answers +\d+ ok, 1 failed", out)
    assert any(re.fullmatch(r"commands: \d+", line) for line in lines)
    assert re.search(r"\ncommands: 3 shown, \d+ in all\n", run(capsys, journal, "--limit", 3))
    assert "sequences: 7" in lines
    assert any(re.search(r"decode_batch ok [\d.]+ \d+/\d \d+\+1, \d+/\d \d+\+1", line) for line in lines)
    assert any(re.search(r"failed \d+ 1 (mixed_step|prefill_chunk): injected fault", line) for line in lines)
    assert any(re.search(r"request 4 injected fault \(command_failed\)", line) for line in lines)
    assert "rank answers later than the first computing in sums" in lines
    assert sum(bool(re.fullmatch(r"[01] \d+( [\d.]+ / [\d.]+ / [\d.]+){3}", line)) for line in lines) == 2


def test_the_objects_keys_are_those_of_the_docstring(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"`(\w+)`", cli_inspect_journal.__doc__ or ""))
    found = run_json(capsys, journal)
    row = next(line for line in found["commands"] if line["rows"])["rows"][0]
    inner = (found["started"], found["end"], found["commands"][0], row, found["sequences"][0], found["failures"][0])
    assert _keys(found, *inner, found["ranks"][0], found["ranks"][0]["lag_us"]) <= named


def _keys(*mappings: Mapping[str, Any]) -> set[str]:
    return {key for mapping in mappings for key in mapping}


def test_the_object_has_what_happened(recorded: Recorded, journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, journal, "--limit", 0)
    assert found["num_commands"] == len(found["commands"]) == sum(found["by_command"].values())
    assert found["outcomes"]["failed"] == 1
    assert found["end"]["reason"] == "the script has ended"
    by_request = {line["request"]: line for line in found["sequences"]}
    for request_id, answer in recorded.outcome.answers.items():
        assert by_request[request_id]["token_ids"] == answer.token_ids
    tokens = [row["token"] for line in found["commands"] for row in line["rows"] if row["request"] == 1]
    assert [token for token in tokens if token is not None] == by_request[1]["token_ids"]


def test_filters_and_limits_narrow_it(recorded: Recorded, journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_json(capsys, journal, "--request", 1, "--limit", 2)
    assert [line["request"] for line in one["sequences"]] == [1]
    assert len(one["commands"]) == 2
    assert all(1 in [row["request"] for row in line["rows"]] for line in one["commands"])
    failures = run_json(capsys, journal, "--failures")
    assert [line["outcome"] for line in failures["commands"]] == ["failed"]
    assert [line["reason"] for line in failures["sequences"]] == ["error"]
    admitted = next(each for each in recorded.records if isinstance(each, Admitted))
    fronts = run_json(capsys, journal, "--front-request", f"{admitted.front}:{admitted.number}")
    assert len(fronts["sequences"]) == 7
    assert run_json(capsys, journal, "--front-request", "5:5")["sequences"] == []


def test_a_redacted_journal_a_torn_one_and_a_dump_are_shown(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redacted = write(tmp_path / "redacted", recorded.records, redact=True)
    assert "prompts, tokens and texts were left out" in run(capsys, redacted)
    torn = write(tmp_path / "torn", recorded.records[:-1])
    segment = next(torn.rglob("*.journal"))
    segment.write_bytes(segment.read_bytes()[:-3])
    out = run(capsys, torn)
    assert "the last record is not whole" in out
    assert "the engine was killed, or still runs" in out
    dump = write_dump(tmp_path / "dumps", "rank-1", recorded.records[8:40], redact=False)
    found = run_json(capsys, dump)
    assert (found["started"], found["end"]) == (None, None)
    assert found["num_commands"] > 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request", "x"], "must be an integer of at least 0"),
        (["--limit", "-1"], "must be an integer of at least 0"),
        (["--front-request", "5"], "must be a front and the number of its request, such as 2:15"),
    ],
)
def test_wrong_flags_are_refused(
    journal: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["inspect-journal", str(journal), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "000001.journal").write_bytes(b"not a journal")
    assert main(["inspect-journal", str(tmp_path / "000001.journal")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
