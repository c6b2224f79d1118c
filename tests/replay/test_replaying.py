# SPDX-License-Identifier: MIT OR Apache-2.0
"""A journal run again: the same tokens, digests and logits, at any number of ranks, and else the first difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import FaultSpec
from metrale_ray.errors import ConfigError, JournalError
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.grammar.texts import grammar_text, of_choice, of_regex
from metrale_ray.protocol.codec import decode_command, encode_command
from metrale_ray.protocol.commands import Cmd, Decode, Scrub, Slot
from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Commanded,
    Ended,
    Gap,
    Record,
    Sampled,
    Snapshot,
)
from metrale_ray.replay.replaying import replay_journal
from metrale_ray.replay.settings import replay_config
from metrale_ray.sampling.token_params import TokenParams
from tests.fixtures.tiny import VOCAB_SIZE, write_tiny
from tests.fixtures.tokenizer import write_tokenizer
from tests.harness import Driver
from tests.replay.journals import SETTINGS, Recorded, busy_script, of_kind, record, replay


def with_record(records: list[Record], index: int, changed: Record) -> list[Record]:
    """The same journal with one other record, up to the next command but one: nothing later is of interest."""
    rest = records[index + 1 :]
    seqs = [place for place, each in enumerate(rest) if isinstance(each, Commanded)]
    return [*records[:index], changed, *rest[: seqs[1]]]


def place(records: list[Record], kind: type, wanted: Callable[[Any], bool]) -> int:
    """Where the first such record is."""
    return next(index for index, each in enumerate(records) if isinstance(each, kind) and wanted(each))


def test_the_journal_has_what_makes_replay_hard(recorded: Recorded) -> None:
    codes = {Cmd(each.cmd) for each in of_kind(recorded.records, Commanded)}
    assert codes >= {Cmd.LOAD, Cmd.PREFILL_CHUNK, Cmd.MIXED_STEP, Cmd.DECODE_BATCH, Cmd.DECODE, Cmd.FREE_SLOT}
    assert recorded.outcome.stats["preemptions"] > 0
    assert "abort" in {each.reason for each in of_kind(recorded.records, Ended)}


@pytest.mark.parametrize("ep_size", [1, 2, pytest.param(3, marks=pytest.mark.nightly), 4])
def test_a_journal_gives_the_same_at_every_number_of_ranks(recorded: Recorded, ep_size: int) -> None:
    result = replay(recorded.records, ep_size=ep_size)
    assert result.difference is None, str(result.difference)
    assert result.num_commands == len(of_kind(recorded.records, Commanded))
    assert result.num_tokens == sum(len(each.tokens) for each in of_kind(recorded.records, Sampled)) > 40
    assert result.num_values == 5 * result.num_tokens
    is_same_size = ep_size == 2
    assert result.num_exact_values == (result.num_values if is_same_size else 0)
    assert [line.split(":")[0] for line in result.kernel_differences] == ([] if is_same_size else ["ep_size"])
    assert result.largest_gap < 1e-4
    assert result.remarks == []


@pytest.mark.parametrize(
    ("recorded_size", "ep_size", "settings"),
    [
        (1, 1, {}),
        pytest.param(1, 4, {}, marks=pytest.mark.nightly),
        (3, 3, {}),
        (3, 2, {"ep_protocol": "v1"}),
        (1, 1, {"dtype": "bfloat16"}),
    ],
)
def test_journals_of_other_engines_give_the_same_too(
    model: Path, recorded_size: int, ep_size: int, settings: dict[str, Any]
) -> None:
    found = record(model, busy_script, ep_size=recorded_size, **settings)
    result = replay(found.records, ep_size=ep_size)
    assert result.difference is None, str(result.difference)
    assert result.num_tokens > 40


FAULTS = {
    "a row fails in the second sum": FaultSpec(1, "inside", layer=1, first_token=7, blame=True),
    "a row fails and the search finds it": FaultSpec(0, "after", first_token=7),
    "a command fails once": FaultSpec(1, "reply", command=9),
    "every rank fails": FaultSpec(0, "validation", command=9),
    "a slot is poisoned": FaultSpec(1, "before", kind="poison", command=10),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_commands_that_failed_are_run_and_settled_as_recorded(model: Path, fault: FaultSpec, scale: int) -> None:
    found = record(model, busy_script, ep_size=2, faults=(fault,))
    for ep_size in (1, 2)[: min(scale, 2)]:
        result = replay(found.records, ep_size=ep_size)
        assert result.difference is None, str(result.difference)
        assert result.num_failed == sum(each.kind != "ok" for each in of_kind(found.records, Answered)) > 0
        assert result.num_failed_again == 0


def test_where_ranks_were_no_longer_in_step_the_rank_that_was_wrong_is_told(model: Path) -> None:
    found = record(model, busy_script, ep_size=3, faults=(FaultSpec(1, "reply", kind="diverge", command=9),))
    result = replay(found.records)
    difference = result.difference
    assert difference is not None
    assert (difference.seq, difference.rank, difference.field) == (9, 1, "digest")
    assert "ended at command 9" in result.remarks[0]


@pytest.mark.parametrize(
    ("kind", "field"), [("flip_token", "tokens"), ("flip_block", "blocks"), ("flip_length", "lengths")]
)
def test_what_a_rank_had_wrong_is_told_at_that_command(model: Path, kind: Any, field: str) -> None:
    found = record(model, busy_script, ep_size=2, faults=(FaultSpec(1, "before", kind=kind, command=10),))
    assert of_kind(found.records, Answered)[-1].kind == "desync"
    for ep_size in (1, 2):
        difference = replay(found.records, ep_size=ep_size).difference
        assert difference is not None
        assert (difference.seq, difference.rank, difference.field) == (10, 1, field)


def test_scrubs_see_the_same_weights_and_cache_rows(model: Path) -> None:
    def script(driver: Driver) -> None:
        driver.submit([11, *range(20, 40)])
        for part in range(4):
            driver.engine.step()
            assert driver.engine._orders.run(Scrub(part, 4, Slot(0))).ok
        driver.run()

    found = record(model, script, ep_size=2, scrub=True)
    scrubs = [each.answers[1].witness for each in of_kind(found.records, Answered) if "kv" in each.answers[1].witness]
    assert len({witness["kv"] for witness in scrubs}) == len(scrubs) == 4
    assert all("weights" in witness for witness in scrubs)
    for ep_size in (1, 2):
        assert replay(found.records, ep_size=ep_size).difference is None
    index = place(found.records, Answered, lambda each: "kv" in each.answers[1].witness)
    answered = found.records[index]
    assert isinstance(answered, Answered)
    wrong = dataclasses.replace(answered.answers[1], witness={**answered.answers[1].witness, "kv": bytes(8)})
    changed = dataclasses.replace(answered, answers=(answered.answers[0], wrong))
    difference = replay(with_record(found.records, index, changed)).difference
    assert difference is not None
    assert (difference.seq, difference.rank, difference.field) == (answered.seq, 1, "kv")


def test_a_life_that_lost_a_rank_is_run_to_its_end(model: Path) -> None:
    found = record(model, busy_script, ep_size=2, faults=(FaultSpec(1, "before", kind="leave", command=10),))
    assert of_kind(found.records, Answered)[-1].kind == "lost"
    result = replay(found.records)
    assert result.difference is None, str(result.difference)
    assert result.num_commands == 10
    assert "a rank lost" in result.remarks[0]


def many_greedy(driver: Driver) -> None:
    for number in range(16):
        driver.submit([number, number * 7, 5], TokenParams(temperature=0, max_tokens=24, ignore_eos=True))
    driver.run()


def test_a_token_within_rounding_of_the_recorded_one_is_told_and_is_no_difference(model: Path, tmp_path: Path) -> None:
    """In bfloat16 sums over other ranks round otherwise; another model's logits differ by more than that."""
    journal = record(model, many_greedy, dtype="bfloat16")
    same = replay_journal(journal.records, replay_config(journal.started, model=str(model), ep_size=1))
    assert (same.difference, same.remarks) == (None, [])
    found = replay_journal(journal.records, replay_config(journal.started, model=str(model), ep_size=2))
    assert found.difference is None
    assert [remark for remark in found.remarks if "within rounding" in remark]
    other = str(write_tiny(tmp_path, "qwen3_moe", seed=9))
    settings = replay_config(journal.started, model=other, ep_size=2)
    differs = replay_journal(journal.records, settings, any_checkpoint=True).difference
    assert differs is not None
    assert differs.field == "the token"


def test_grammars_give_the_same_tokens(tmp_path: Path) -> None:
    model = write_tokenizer(write_tiny(tmp_path, "qwen3_moe", eos_token_id=0, num_hidden_layers=1))
    grammars = Grammars(model, VOCAB_SIZE, [0])

    def script(driver: Driver) -> None:
        for part in (of_regex("[a-c]{3}-\\d+x"), of_choice(["yes", "no"])):
            text = grammar_text(part)
            for temperature in (0.0, 1.0):
                params = TokenParams(temperature=temperature, max_tokens=12, grammar=text, n=2, seed=3)
                driver.submit([40, 41, 42], params, constraint=grammars.compile(text))
        driver.run()

    found = record(model, script, ep_size=2)
    for ep_size in (1, 2):
        result = replay(found.records, ep_size=ep_size)
        assert result.difference is None, str(result.difference)
        assert result.num_requests == 8


# From a snapshot --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def snapped(model: Path) -> Recorded:
    """A busy engine that is asked for a snapshot before every step."""
    from metrale_ray.protocol.journal.journal import MemoryJournal
    from tests.harness import run_engine

    journal = MemoryJournal()

    class Asking(Driver):
        def run(self, max_steps: int = 10_000) -> None:
            for _ in range(max_steps):
                journal.is_snapshot_due = True
                if not self.engine.step():
                    return
            raise AssertionError("still at work")

    def script(driver: Driver) -> None:
        busy_script(Asking(driver.engine, driver.answers))

    outcome = run_engine(model, script, ep_size=2, journal=journal, **SETTINGS)
    journal.close("the script has ended", None)
    return Recorded(journal.records, outcome)


def test_snapshots_in_the_middle_change_nothing(snapped: Recorded) -> None:
    assert len(of_kind(snapped.records, Snapshot)) > 20
    result = replay(snapped.records)
    assert result.difference is None
    assert result.num_exact_values == result.num_values


def test_from_every_snapshot_on_a_journal_gives_the_same_tokens_and_digests(snapped: Recorded, scale: int) -> None:
    records = snapped.records
    places = [index for index, each in enumerate(records) if isinstance(each, Snapshot)]
    for index in places[:: max(1, 12 // scale)]:
        snapshot = records[index]
        assert isinstance(snapshot, Snapshot)
        result = replay(records[index:], ep_size=1)
        assert result.difference is None, f"from {snapshot.seq}: {result.difference}"
        assert result.num_commands == sum(each.seq > snapshot.seq for each in of_kind(records, Commanded))
        assert f"taken up at the snapshot behind command {snapshot.seq}" in result.remarks


def test_what_stands_on_a_snapshot_is_not_held_to_the_last_bit_and_what_comes_anew_is(snapped: Recorded) -> None:
    records = snapped.records
    index = place(records, Snapshot, lambda each: each.live)
    anew = replay(records[index:])
    assert anew.difference is None
    assert 0 < anew.num_exact_values < anew.num_values


def test_behind_a_gap_it_goes_on_at_the_next_snapshot(snapped: Recorded) -> None:
    records = snapped.records
    seqs = [each.seq for each in of_kind(records, Snapshot)]
    cut = place(records, Commanded, lambda each: each.seq == seqs[3])
    again = place(records, Snapshot, lambda each: each.seq == seqs[9])
    result = replay([*records[:cut], Gap(0, 5), *records[cut + 5 : again], *records[again:]])
    assert result.difference is None, str(result.difference)
    assert "5 records are missing behind command" in result.remarks[0]
    assert result.num_commands < len(of_kind(records, Commanded))


def test_commands_behind_a_gap_without_a_snapshot_are_not_run(recorded: Recorded) -> None:
    cut = place(recorded.records, Commanded, lambda each: each.seq == 9)
    result = replay([*recorded.records[:cut], Gap(0, 0), *recorded.records[cut + 3 :]])
    assert (result.difference, result.num_commands) == (None, 8)
    assert result.remarks[0] == "records, nobody knows how many, are missing behind command 8"
    assert "could not be run" in result.remarks[-1]


def test_a_snapshot_that_no_rank_can_hold_is_an_error(snapped: Recorded) -> None:
    index = place(snapped.records, Snapshot, lambda each: any(note.length for note in each.live))
    snapshot = snapped.records[index]
    assert isinstance(snapshot, Snapshot)
    live = tuple(dataclasses.replace(note, block_table=(9999,)) for note in snapshot.live)
    with pytest.raises(JournalError, match=r"cannot be taken up: rank 0: block 9999"):
        replay([dataclasses.replace(snapshot, live=live), *snapped.records[index + 1 :]])


# What differs is found --------------------------------------------------------------------------------------------


def other_token(record: Sampled) -> Sampled:
    note = record.tokens[0]
    assert note.token_id is not None
    return dataclasses.replace(record, tokens=(note._replace(token_id=note.token_id ^ 1), *record.tokens[1:]))


def test_another_token_is_found_at_its_command(recorded: Recorded) -> None:
    index = place(recorded.records, Sampled, lambda each: len(each.tokens) > 1)
    sampled = recorded.records[index]
    assert isinstance(sampled, Sampled)
    note = sampled.tokens[0]
    for ep_size in (1, 2):
        difference = replay(with_record(recorded.records, index, other_token(sampled)), ep_size=ep_size).difference
        assert difference is not None
        assert (difference.seq, difference.field, difference.request_id) == (sampled.seq, "the token", note.request_id)
        assert difference.recorded != difference.found == str(note.token_id)


def test_a_token_that_was_not_noted_and_one_of_no_row_are_found(recorded: Recorded) -> None:
    index = place(recorded.records, Sampled, lambda each: len(each.tokens) > 1)
    sampled = recorded.records[index]
    assert isinstance(sampled, Sampled)
    fewer = dataclasses.replace(sampled, tokens=sampled.tokens[1:])
    more = dataclasses.replace(sampled, tokens=(*sampled.tokens, sampled.tokens[0]._replace(request_id=999)))
    for changed, recorded_text, found in ((fewer, "none", None), (more, None, "no such row")):
        difference = replay(with_record(recorded.records, index, changed), ep_size=1).difference
        assert difference is not None
        assert difference.seq == sampled.seq
        assert recorded_text in (None, difference.recorded)
        assert found in (None, difference.found)


def test_a_logit_is_held_to_the_last_bit_where_the_kernels_are_the_same(recorded: Recorded) -> None:
    index = place(recorded.records, Sampled, lambda each: True)
    sampled = recorded.records[index]
    assert isinstance(sampled, Sampled)
    note = sampled.tokens[0]
    values = (note.values[0] * (1 + 2**-22), *note.values[1:])
    changed = with_record(
        recorded.records,
        index,
        dataclasses.replace(sampled, tokens=(note._replace(values=values), *sampled.tokens[1:])),
    )
    difference = replay(changed).difference
    assert difference is not None
    assert (difference.seq, difference.field) == (sampled.seq, "the logits noted with the token")
    elsewhere = replay(changed, ep_size=1)
    assert elsewhere.difference is None
    assert elsewhere.largest_gap > 0


@pytest.mark.parametrize("name", ["tokens", "blocks", "lengths", "command", "residual", "routing", "digest"])
def test_each_witness_of_each_rank_is_compared(recorded: Recorded, name: str) -> None:
    index = place(recorded.records, Answered, lambda each: name == "digest" or name in each.answers[1].witness)
    answered = recorded.records[index]
    assert isinstance(answered, Answered)
    answer = answered.answers[1]
    if name == "digest":
        wrong = dataclasses.replace(answer, digest=bytes(8 * [1]))
    else:
        wrong = dataclasses.replace(answer, witness={**answer.witness, name: bytes(8)})
    changed = with_record(recorded.records, index, dataclasses.replace(answered, answers=(answered.answers[0], wrong)))
    difference = replay(changed).difference
    assert difference is not None
    assert (difference.seq, difference.rank, difference.field) == (answered.seq, 1, name)
    elsewhere = replay(changed, ep_size=1).difference
    assert (elsewhere is None) == (name in ("residual", "routing"))  # what depends on who computes it


def test_a_command_that_succeeded_and_fails_here_is_a_difference(recorded: Recorded) -> None:
    index = place(recorded.records, Commanded, lambda each: each.cmd == Cmd.DECODE)
    commanded = recorded.records[index]
    assert isinstance(commanded, Commanded)
    assert commanded.data is not None
    frame = decode_command(commanded.data)
    assert isinstance(frame.command, Decode)
    row = dataclasses.replace(frame.command.row, start=frame.command.row.start + 1)
    data = encode_command(frame.envelope, Decode(row))
    difference = replay(with_record(recorded.records, index, dataclasses.replace(commanded, data=data))).difference
    assert difference is not None
    assert (difference.seq, difference.field, difference.recorded) == (commanded.seq, "the outcome", "ok")
    assert difference.found.startswith(f"refused: slot {row.slot} starts at {row.start}")


def test_a_token_that_a_slow_grammar_did_not_get_is_no_difference(recorded: Recorded) -> None:
    index = place(recorded.records, Sampled, lambda each: len(each.tokens) > 1)
    sampled = recorded.records[index]
    assert isinstance(sampled, Sampled)
    lost = sampled.tokens[0].request_id
    fewer = dataclasses.replace(sampled, tokens=sampled.tokens[1:])
    cut = [*recorded.records[:index], fewer, Ended(0, lost, "error", "grammar_failed", "slow")]
    result = replay(cut)
    assert result.difference is None, str(result.difference)


# Journals that end, or cannot be run ------------------------------------------------------------------------------


def test_a_journal_that_ends_inside_a_command_runs_it_and_says_so(recorded: Recorded) -> None:
    cut = place(recorded.records, Commanded, lambda each: each.seq == 12)
    result = replay(recorded.records[: cut + 1])
    assert result.difference is None
    assert result.remarks == ["the journal ends inside command 12; every rank carried it out here"]


def test_a_journal_that_ends_before_its_tokens_is_no_difference(recorded: Recorded) -> None:
    cut = place(recorded.records, Sampled, lambda each: True)
    result = replay(recorded.records[:cut])
    assert result.difference is None
    assert result.remarks == ["the journal has no end: its engine was killed, or still runs"]


def test_another_checkpoint_is_refused_unless_it_is_allowed(recorded: Recorded, tmp_path: Path) -> None:
    other = write_tiny(tmp_path, "qwen3_moe", seed=1, num_hidden_layers=2)
    config = replay_config(recorded.started, model=str(other))
    with pytest.raises(ConfigError, match=r"is not the one of this journal: file model\.safetensors: recorded"):
        replay_journal(recorded.records, config)
    result = replay_journal(recorded.records, config, any_checkpoint=True)
    assert result.file_differences
    assert result.difference is not None
    assert result.difference.field == "the token"


def test_what_cannot_be_run_is_said(recorded: Recorded) -> None:
    records = recorded.records
    first = place(records, Commanded, lambda each: True)
    redacted = dataclasses.replace(recorded.started, redacted=True)
    cases: list[tuple[list[Record], str]] = [
        ([redacted, *records[1:]], "leaves prompts, tokens and frames out"),
        (records[first:], "begins with neither"),
        ([records[0], *records[first + 3 :]], "comes before any load"),
        ([*records[: first + 2], *records], "a second engine's life"),
        ([*records[: first + 2], *records[first + 5 :]], "settles command .*: records are missing in between"),
    ]
    commanded = records[first]
    assert isinstance(commanded, Commanded)
    broken = dataclasses.replace(commanded, data=b"\xc1")
    cases.append((with_record(records, first, broken), "the frame of command 1 cannot be read here"))
    admitted = place(records, Admitted, lambda each: True)
    request = records[admitted]
    assert isinstance(request, Admitted)
    cases.append((with_record(records, admitted, dataclasses.replace(request, params={})), "cannot be read"))
    for case, message in cases:
        with pytest.raises(JournalError, match=message):
            replay(case)


def test_progress_is_told_while_loading_and_for_each_command(recorded: Recorded) -> None:
    seen: list[tuple[str, int, int]] = []
    replay_journal(recorded.records, replay_config(recorded.started), on_progress=lambda *told: seen.append(told))
    total = len(of_kind(recorded.records, Commanded))
    loading = [told for told in seen if told[0] == "loading"]
    assert loading[-1][1] == loading[-1][2] > 0
    assert [told for told in seen if told[0] == "replaying"] == [("replaying", n, total) for n in range(1, total + 1)]
