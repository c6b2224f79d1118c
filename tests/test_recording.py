# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an engine notes in its journal: whole engines in one process, and a journal in memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TypeVar

import pytest

from metrale_ray.config import FaultSpec
from metrale_ray.errors import LinkLost, RequestError
from metrale_ray.protocol.codec import decode_command
from metrale_ray.protocol.commands import Cmd, command_rows
from metrale_ray.protocol.journal.journal import MemoryJournal
from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Ended,
    Record,
    Sampled,
    Snapshot,
    Started,
)
from metrale_ray.recording import Recording
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import RequestId
from tests.fixtures.succ import write_succ
from tests.harness import GREEDY, Driver, Outcome, Script, run_engine

Kind = TypeVar("Kind")
SMALL = {"max_batch_size": 4, "max_model_len": 200, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_succ(tmp_path_factory.mktemp("succ"))


def recorded(model: Path, script: Script, **settings: object) -> tuple[Outcome, list[Record]]:
    journal = MemoryJournal()
    return run_engine(model, script, journal=journal, **{**SMALL, **settings}), journal.records


def of(kind: type[Kind], records: list[Record]) -> list[Kind]:
    return [record for record in records if isinstance(record, kind)]


def two_requests(driver: Driver) -> None:
    driver.submit([10, 11, 12], TokenParams(temperature=0, max_tokens=3, ignore_eos=True, n=2))
    driver.submit([50], GREEDY)
    driver.run()


def test_a_journal_tells_the_start_the_requests_and_every_command_with_all_answers(model: Path) -> None:
    outcome, records = recorded(model, two_requests, ep_size=2)
    started = records[0]
    assert isinstance(started, Started)
    assert (started.epoch, started.version, started.redacted) == (1, 2, False)
    assert started.config["model"] == str(model)
    assert "faults" not in started.config
    assert len(started.ranks) == 2
    first, second = of(Admitted, records)
    assert (first.request_ids, first.prompt_token_ids, first.params["max_tokens"]) == ((0, 1), (10, 11, 12), 3)
    assert (second.request_ids, second.prompt_token_ids) == ((2,), (50,))
    commands, answers = of(Commanded, records), of(Answered, records)
    assert [command.seq for command in commands] == [answer.seq for answer in answers]
    assert [command.seq for command in commands] == list(range(1, outcome.stats["commands"] + 2))  # and the shutdown
    for command, answer in zip(commands, answers, strict=True):
        assert command.data is not None
        frame = decode_command(command.data)
        assert frame.envelope.seq == command.seq
        rows = [(span.slot, span.start, len(span.token_ids)) for span in command_rows(frame.command)]
        assert [(row.slot, row.start, row.num_tokens) for row in command.rows] == rows
        assert answer.kind == "ok"
        assert [each.rank for each in answer.answers] == [0, 1]
        assert answer.answers[0].digest == answer.answers[1].digest


def test_the_tokens_and_the_ends_are_those_that_were_delivered(model: Path) -> None:
    outcome, records = recorded(model, two_requests)
    tokens: dict[int, list[int | None]] = {}
    for sampled in of(Sampled, records):
        for note in sampled.tokens:
            tokens.setdefault(note.request_id, []).append(note.token_id)
            assert len(note.values) == 5
            assert note.values[0] == max(note.values)  # the logit of a greedy token
    assert tokens == {number: answer.token_ids for number, answer in outcome.answers.items()}
    assert {ended.request_id: ended.reason for ended in of(Ended, records)} == {0: "length", 1: "length", 2: "length"}


def test_times_never_run_backwards(model: Path) -> None:
    _, records = recorded(model, two_requests, ep_size=3)
    times = [record.at_us for record in records if not isinstance(record, Started)]
    assert times == sorted(times)


def test_what_is_refused_aborted_and_failed_is_noted_with_its_reason(model: Path) -> None:
    def script(driver: Driver) -> None:
        with pytest.raises(RequestError):
            driver.submit([1] * 500)
        aborted = driver.submit([20])
        driver.submit([30])
        driver.engine.step()
        driver.engine.abort(RequestId(aborted))
        driver.run()

    fault = FaultSpec(rank=1, phase="inside", first_token=30, message="no thirty")
    _, records = recorded(model, script, ep_size=2, faults=(fault,))
    ends = {ended.request_id: ended for ended in of(Ended, records)}
    assert ends[1].reason == "abort"
    assert (ends[2].reason, ends[2].code) == ("error", "command_failed")
    assert "no thirty" in ends[2].message
    kinds = Counter(answer.kind for answer in of(Answered, records))
    assert kinds["failed"] >= 1
    failed = next(answer for answer in of(Answered, records) if answer.kind == "failed")
    assert failed.rank == 1
    assert failed.answers[1].error is not None
    assert of(Admitted, records)[0].request_ids != (0,)  # the refused one was never admitted


def test_the_command_that_ended_the_engine_is_noted_as_lost_with_the_answers_that_came(model: Path) -> None:
    def script(driver: Driver) -> None:
        driver.submit([20])
        driver.run()

    outcome, records = recorded(model, script, ep_size=3, faults=(FaultSpec(rank=2, phase="before", kind="leave"),))
    assert isinstance(outcome.head_error, LinkLost)
    last = of(Answered, records)[-1]
    assert last.kind == "lost"
    assert last.message == outcome.head_error.message
    assert last.seq == of(Commanded, records)[-1].seq


def test_a_snapshot_holds_every_slot_of_the_ranks_and_who_waits(model: Path) -> None:
    journal = MemoryJournal()

    def script(driver: Driver) -> None:
        ids = [driver.submit([100 + 10 * number], GREEDY) for number in range(6)]
        driver.engine.step()
        driver.engine.step()
        driver.engine.abort(RequestId(0))  # its slot is freed by the next step
        journal.is_snapshot_due = True
        driver.run()
        assert ids == list(range(6))

    run_engine(model, script, ep_size=2, journal=journal, **SMALL)
    (snapshot,) = of(Snapshot, journal.records)
    assert isinstance(journal.records[0], Started)
    assert snapshot.started == journal.records[0]
    assert snapshot.settled_ok
    held = {note.slot: note for note in snapshot.live if note.slot is not None}
    assert sorted(held) == [0, 1, 2, 3]
    assert (held[0].request_id, held[0].tokens, held[0].length) == (0, (), 2)
    for slot in (1, 2, 3):
        note = held[slot]
        assert note.tokens == (100 + 10 * slot, 101 + 10 * slot, 102 + 10 * slot)
        assert (note.length, note.num_prompt_tokens, len(note.block_table)) == (2, 1, 1)
    assert {note.request_id: note.tokens for note in snapshot.live if note.slot is None} == {4: (140,), 5: (150,)}
    assert {record.request_ids for record in snapshot.admitted} == {(1,), (2,), (3,), (4,), (5,)}


def test_without_a_journal_only_the_last_commands_are_there(model: Path) -> None:
    kept: list[list[Record]] = []

    def script(driver: Driver) -> None:
        for first in range(0, 300, 3):
            driver.submit([first], TokenParams(temperature=0, max_tokens=2, ignore_eos=True))
            driver.run()
        kept.append(driver.engine.recording.last_records(LinkLost("why", rank=2)))

    quiet = MemoryJournal()
    quiet.is_on = False
    run_engine(model, script, journal=quiet, **SMALL)
    assert quiet.records == []
    commands = of(Commanded, kept[0])
    assert len(commands) == 64
    assert [command.seq for command in commands] == list(range(commands[0].seq, commands[0].seq + 64))
    assert isinstance(kept[0][0], Started)
    assert isinstance(kept[0][-1], Closed)
    assert (kept[0][-1].reason, kept[0][-1].failure) == (
        "the last commands of rank 0, ended by link_lost (rank 2)",
        "why",
    )
    assert {Cmd(command.cmd) for command in commands} >= {Cmd.PREFILL_CHUNK, Cmd.DECODE, Cmd.FREE_SLOT}


def test_pings_and_scrubs_of_an_idle_engine_do_not_push_out_its_last_steps(model: Path) -> None:
    kept: list[list[Record]] = []

    def script(driver: Driver) -> None:
        driver.submit([20])
        driver.run()
        for _ in range(100):
            driver.engine.ping()
            driver.engine.scrub()
        kept.append(driver.engine.recording.last_records(LinkLost("why")))

    run_engine(model, script, ep_size=2, **SMALL)
    commands = [Cmd(command.cmd) for command in of(Commanded, kept[0])]
    assert commands[:3] == [Cmd.LOAD, Cmd.PREFILL_CHUNK, Cmd.DECODE]
    assert commands[-2:] == [Cmd.FREE_SLOT, Cmd.SCRUB]  # the newest is there, as it shows that all was well


def test_a_recording_without_a_journal_costs_no_record() -> None:
    recording = Recording()
    assert not recording.is_on
    assert not recording.wants_snapshot()
    recording.refused((1, 2), "code", "message")
    recording.close("done", None)
