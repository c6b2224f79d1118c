# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a listing gathers of a journal: the last of everything, counts of all, and how ranks kept up."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.config import FaultSpec
from metrale_ray.protocol.commands import Cmd
from metrale_ray.protocol.journal.records import (
    Answered,
    Closed,
    Commanded,
    Ended,
    Gap,
    ReadRecord,
    Refused,
    Snapshot,
    Unknown,
)
from metrale_ray.protocol.journal.redaction import Redaction
from metrale_ray.replay.listing import Listing, Wanted, spread
from tests.replay.journals import Recorded, busy_script, of_kind, record


def listing(records: list[ReadRecord], wanted: Wanted | None = None, limit: int | None = None) -> Listing:
    found = Listing(Wanted() if wanted is None else wanted, limit)
    for each in records:
        found.add(each)
    return found


def test_all_of_it_is_listed(recorded: Recorded) -> None:
    found = listing([*recorded.records])
    assert found.started == recorded.started
    assert found.num_commands == len(found.commands) == sum(found.by_cmd.values()) == found.outcomes["ok"]
    assert found.by_cmd[Cmd.LOAD] == found.by_cmd[Cmd.SHUTDOWN] == 1
    assert found.closed is not None
    assert (found.num_failures, found.num_gaps, found.num_unknown, found.snapshot_seq) == (0, 0, 0, None)
    lines = {line.request_id: line for line in found.sequences}
    assert lines.keys() == recorded.outcome.answers.keys()
    for request_id, answer in recorded.outcome.answers.items():
        line = lines[request_id]
        assert line.token_ids == answer.token_ids
        assert line.num_tokens == len(answer.token_ids)
        assert line.reason == (answer.finish_reason or "abort")
        assert line.ended_us is not None
        assert line.first_token_us is not None
        assert line.admitted_us <= line.first_token_us <= line.ended_us
    preempted = [line for line in found.sequences if line.num_starts > 1]
    assert sum(line.num_starts - 1 for line in preempted) == recorded.outcome.stats["preemptions"]


def test_a_limit_keeps_the_last_ones_and_counts_all(recorded: Recorded) -> None:
    found, everything = listing([*recorded.records], limit=3), listing([*recorded.records])
    assert [line.seq for line in found.commands] == [line.seq for line in everything.commands][-3:]
    assert [line.request_id for line in found.sequences] == [line.request_id for line in everything.sequences][-3:]
    assert found.num_commands == everything.num_commands
    assert found.num_sequences == everything.num_sequences


def test_one_request_is_listed_alone(recorded: Recorded) -> None:
    found = listing([*recorded.records], Wanted(request_id=2))
    assert [line.request_id for line in found.sequences] == [2]
    assert found.commands
    assert all(any(row.request_id == 2 for row in line.rows) for line in found.commands)
    assert listing([*recorded.records], Wanted(request_id=99)).sequences == []


def test_a_fronts_request_is_listed_by_its_number(recorded: Recorded) -> None:
    admitted = [each for each in recorded.records if hasattr(each, "request_ids")]
    records = [
        dataclasses.replace(each, front=2, number=7) if each is admitted[1] else each  # type: ignore[call-arg]
        for each in recorded.records
    ]
    found = listing([*records, Refused(9, 2, 7, "code", "no"), Refused(9, 2, 8, "code", "no")], Wanted(None, (2, 7)))
    assert [line.request_id for line in found.sequences] == [1, 2, 3]
    assert [line.text for line in found.failures] == ["request 7 of front 2: no (code)"]


def test_failures_are_listed(model: Path) -> None:
    faults = (FaultSpec(1, "inside", layer=1, first_token=7, blame=True),)
    records = record(model, busy_script, ep_size=2, faults=faults).records
    extra = [Gap(5, 3), Gap(5, 0), Unknown("later"), Closed(9, "it broke", "rank 1 left")]
    found = listing([*records[:-1], *extra], Wanted(failures=True))
    whats = [line.what for line in found.failures]
    assert whats == ["failed", "request", "gap", "gap", "end"]
    assert found.failures[0].rank == 1
    assert "injected fault" in found.failures[0].text
    assert (found.num_failures, found.num_gaps, found.num_unknown) == (5, 2, 1)
    assert {line.outcome for line in found.commands} == {"failed"}
    assert [line.reason for line in found.sequences] == ["error"]


def test_what_lives_is_listed_after_what_ended_and_a_snapshot_brings_it_back(recorded: Recorded) -> None:
    end = next(i for i, each in enumerate(recorded.records) if isinstance(each, Ended))
    found = listing([*recorded.records[: end + 1]])
    assert found.sequences[0].reason is not None
    assert all(line.reason is None for line in found.sequences[1:])
    assert len(found.live) >= 1


def test_a_journal_that_begins_with_a_snapshot_knows_its_sequences(model: Path) -> None:
    from metrale_ray.protocol.journal.journal import MemoryJournal
    from tests.harness import Driver, run_engine
    from tests.replay.journals import SETTINGS

    journal = MemoryJournal()

    def script(driver: Driver) -> None:
        first = driver.submit([1, 2, 3])
        for _ in range(4):
            driver.engine.step()
        journal.is_snapshot_due = True
        driver.run()
        assert first == 0

    outcome = run_engine(model, script, journal=journal, **SETTINGS)
    index = next(i for i, each in enumerate(journal.records) if isinstance(each, Snapshot))
    whole, rest = listing([*journal.records]), listing([*journal.records[index:]])
    snapshot = journal.records[index]
    assert isinstance(snapshot, Snapshot)
    assert rest.snapshot_seq == snapshot.seq
    assert rest.started == whole.started
    for found in (whole, rest):
        assert [line.token_ids for line in found.sequences] == outcome.tokens()
        assert found.num_sequences == 1
    # What a snapshot does not name any more has ended where records are missing.
    cut = listing([*journal.records[: index - 5], dataclasses.replace(snapshot, live=(), admitted=())])
    assert [line.reason for line in cut.sequences] == [None]
    assert cut.live == {}


def test_a_journal_without_content_is_listed(recorded: Recorded) -> None:
    redaction = Redaction()
    found = listing([redaction.redact(each) for each in recorded.records])
    assert found.num_commands == len(of_kind(recorded.records, Commanded))
    assert all(line.token_ids == [] and line.prompt_token_ids is None for line in found.sequences)
    assert {line.num_tokens for line in found.sequences} == {
        len(a.token_ids) for a in recorded.outcome.answers.values()
    }


def test_a_command_without_an_answer_has_no_outcome(recorded: Recorded) -> None:
    index = next(i for i, each in enumerate(recorded.records) if isinstance(each, Answered))
    assert listing([*recorded.records[:index]]).commands[-1].outcome is None


def test_every_ranks_times_are_gathered(recorded: Recorded) -> None:
    found = listing([*recorded.records])
    assert found.ranks.keys() == {0, 1}
    for rank, times in found.ranks.items():
        answers = [each for one in of_kind(recorded.records, Answered) for each in one.answers if each.rank == rank]
        assert list(times.computed_us) == [each.computed_us for each in answers]
        assert list(times.lag_us) == [each.lag_us for each in answers]
        assert list(times.waited_us) == [each.waited_us for each in answers]


@given(st.lists(st.integers(0, 2**40), min_size=1))
def test_a_spread_is_of_its_values(values: list[int]) -> None:
    found = spread(array("Q", values))
    assert found["max"] == max(values)
    assert min(values) <= found["mean"] <= max(values)
    assert sum(value <= found["p99"] for value in values) >= 0.99 * len(values)
    assert found["p99"] in values


@pytest.mark.parametrize(("count", "p99"), [(1, 0), (100, 98), (200, 197)])
def test_the_99th_percentile_is_the_nearest_rank(count: int, p99: int) -> None:
    assert spread(array("Q", range(count)))["p99"] == p99
    assert spread(array("Q")) == {"mean": 0, "p99": 0, "max": 0}
