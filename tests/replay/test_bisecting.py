# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where two journals, or two runs of one journal, part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.errors import ConfigError, JournalError
from metrale_ray.protocol.codec import decode_command, encode_command
from metrale_ray.protocol.commands import BlockId, Command, DecodeBatch, FreeSlot, Load, Slot
from metrale_ray.protocol.journal.records import Answered, Commanded, Gap, Record, Sampled
from metrale_ray.protocol.journal.redaction import Redaction
from metrale_ray.replay.configuration_bisecting import bisect_configurations
from metrale_ray.replay.journal_bisecting import bisect_journals
from metrale_ray.replay.parting import BisectResult, Parting, largest_gap, logit_gaps
from metrale_ray.replay.settings import replay_config
from tests.harness import Driver
from tests.replay.journals import Recorded, busy_script, of_kind, record

TOLERANCE = 1e-3


def with_command(records: list[Record], kind: type, change: Callable[[Any], Command]) -> tuple[list[Record], Commanded]:
    """The same journal with one command changed in its frame, and that command's record."""
    for index, each in enumerate(records):
        if isinstance(each, Commanded) and each.data is not None:
            frame = decode_command(each.data)
            if isinstance(frame.command, kind):
                data = encode_command(frame.envelope, change(frame.command))
                changed = dataclasses.replace(each, data=data)
                return [*records[:index], changed, *records[index + 1 :]], each
    raise AssertionError(f"no {kind.__name__}")


def first_row(command: DecodeBatch, **changes: Any) -> DecodeBatch:
    return DecodeBatch((dataclasses.replace(command.rows[0], **changes), *command.rows[1:]))


def parting(a: list[Record], b: list[Record], tolerance: float = TOLERANCE) -> Parting:
    found = bisect_journals(a, b, tolerance).parting
    assert found is not None
    return found


def test_a_journal_and_itself_are_the_same(recorded: Recorded) -> None:
    steps = 0

    def on_step() -> None:
        nonlocal steps
        steps += 1

    result = bisect_journals(recorded.records, recorded.records, 0.0, on_step)
    assert result.parting is None
    assert result.num_commands == steps == len(of_kind(recorded.records, Commanded))
    assert (result.largest_gap, result.remarks) == (0.0, [])
    assert result.num_logits > 100


def test_two_lives_of_the_same_jobs_are_the_same_at_other_numbers_of_ranks(model: Path, recorded: Recorded) -> None:
    alone = record(model, busy_script)
    result = bisect_journals(recorded.records, alone.records, TOLERANCE)
    assert result.parting is None, str(result.parting)
    assert result.num_commands > 40


CHANGES: dict[str, tuple[type, Callable[[Any], Command], str]] = {
    "a slot": (DecodeBatch, lambda c: first_row(c, slot=Slot(5)), "the slot"),
    "a start": (DecodeBatch, lambda c: first_row(c, start=1), "the start"),
    "a token": (DecodeBatch, lambda c: first_row(c, token_ids=(319,)), "the token ids, at place 0"),
    "a block": (
        DecodeBatch,
        lambda c: first_row(c, new_blocks=(*c.rows[0].new_blocks, BlockId(3))),
        "the number of new blocks",
    ),
    "a freed slot": (FreeSlot, lambda c: FreeSlot(Slot(c.slot + 1)), "what the command carries"),
    "blocks": (Load, lambda c: Load(c.num_blocks + 1), "what the command carries"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "field"), CHANGES.values(), ids=CHANGES)
def test_the_field_of_a_command_is_named(
    recorded: Recorded, kind: type, change: Callable[[Any], Command], field: str
) -> None:
    changed, commanded = with_command(recorded.records, kind, change)
    found = parting(recorded.records, changed)
    assert (found.seq, found.field) == (commanded.seq, field)
    assert found.a != found.b


def test_other_commands_rows_outcomes_and_tokens_are_found(recorded: Recorded) -> None:
    records = recorded.records

    def changed(kind: type, change: Callable[[Any], Record]) -> list[Record]:
        index = next(i for i, each in enumerate(records) if isinstance(each, kind) and getattr(each, "tokens", (1,)))
        return [*records[:index], change(records[index]), *records[index + 1 :]]

    def other_token(each: Sampled) -> Sampled:
        assert each.tokens[0].token_id is not None
        return dataclasses.replace(each, tokens=(each.tokens[0]._replace(token_id=each.tokens[0].token_id + 1),))

    cases = {
        "the command": changed(Commanded, lambda each: dataclasses.replace(each, cmd=7)),
        "the outcome": changed(Answered, lambda each: dataclasses.replace(each, kind="failed")),
        "the token": changed(Sampled, other_token),
    }
    for field, case in cases.items():
        assert parting(records, case).field == field
        assert parting(case, records).field == field


def test_logits_may_differ_by_the_tolerance(recorded: Recorded) -> None:
    index = next(i for i, each in enumerate(recorded.records) if isinstance(each, Sampled))
    sampled = recorded.records[index]
    assert isinstance(sampled, Sampled)
    note = sampled.tokens[0]
    values = (note.values[0] + 0.01, *note.values[1:])
    changed = dataclasses.replace(sampled, tokens=(note._replace(values=values), *sampled.tokens[1:]))
    other = [*recorded.records[:index], changed, *recorded.records[index + 1 :]]
    within = bisect_journals(recorded.records, other, 0.02)
    assert within.parting is None
    assert within.largest_gap == pytest.approx(0.01)
    assert within.largest_gap_seq == sampled.seq
    found = parting(recorded.records, other)
    assert (found.seq, found.request_id) == (sampled.seq, note.request_id)
    assert found.field.startswith("a logit noted with the token, by 0.01")


def test_jobs_that_differ_part_at_their_first_row(model: Path, recorded: Recorded) -> None:
    def script(driver: Driver) -> None:
        driver.submit([11, *range(20, 39), 77])
        driver.run()

    found = parting(recorded.records, record(model, script).records)
    assert found.seq in (2, 3)


def test_what_only_one_of_the_two_has_is_told(recorded: Recorded) -> None:
    records = recorded.records
    cut = next(i for i, each in enumerate(records) if isinstance(each, Commanded) and each.seq == 6)
    end = next(i for i, each in enumerate(records) if isinstance(each, Commanded) and each.seq == 30)
    result = bisect_journals(records, [Gap(0, 0), *records[cut:end]], 0.0)
    assert result.parting is None
    assert result.num_commands == 24
    assert result.remarks == [
        "5 commands are in A alone, at its beginning or in gaps of the other",
        "A goes on at command 30, where the other one has ended",
    ]
    assert bisect_journals(records[:cut], records[cut:], 0.0).remarks[-1] == "no command is in both"


def test_tokens_that_were_lost_with_the_end_or_in_a_gap_are_no_difference(recorded: Recorded) -> None:
    records = recorded.records
    sampled = next(i for i, each in enumerate(records) if isinstance(each, Sampled))
    seqs = [each.seq for each in of_kind(records[:sampled], Commanded)]
    torn = bisect_journals(records[:sampled], records, 0.0)
    assert (torn.parting, torn.num_commands) == (None, len(seqs))
    gap = bisect_journals([*records[:sampled], Gap(0, 1), *records[sampled + 1 :]], records, 0.0)
    assert gap.parting is None
    assert gap.remarks == ["1 command is in B alone, at its beginning or in gaps of the other"]


def test_journals_without_content_are_compared_as_far_as_they_go(recorded: Recorded) -> None:
    redaction = Redaction()
    redacted = [redaction.redact(each) for each in recorded.records]
    result = bisect_journals(redacted, redacted, 0.0)
    assert (result.parting, result.num_logits) == (None, 0)
    index = next(i for i, each in enumerate(redacted) if isinstance(each, Commanded) and each.rows)
    commanded = redacted[index]
    assert isinstance(commanded, Commanded)
    row = commanded.rows[0]._replace(start=5)
    other = dataclasses.replace(commanded, rows=(row, *commanded.rows[1:]))
    assert parting(redacted, [*redacted[:index], other, *redacted[index + 1 :]]).field == "the start"


# One journal under two configurations -------------------------------------------------------------------------------


def configurations(
    recorded: Recorded, a: dict[str, Any], b: dict[str, Any], tolerance: float = TOLERANCE
) -> BisectResult:
    sides = (replay_config(recorded.started, **side) for side in (a, b))
    return bisect_configurations(recorded.records, *sides, tolerance)


def test_numbers_of_ranks_stay_within_the_tolerance(recorded: Recorded) -> None:
    result = configurations(recorded, {"ep_size": 1}, {"ep_size": 4})
    assert result.parting is None, str(result.parting)
    assert result.largest_gap < 1e-4
    assert result.num_commands == len(of_kind(recorded.records, Commanded))
    assert result.num_logits % 320 == 0


def test_dtypes_part_at_the_first_command_with_logits(recorded: Recorded) -> None:
    result = configurations(recorded, {}, {"dtype": "bfloat16"})
    assert result.parting is not None
    assert result.parting.seq == result.largest_gap_seq == 3
    assert result.parting.request_id is not None
    assert result.largest_gap > TOLERANCE
    assert float(result.parting.a) - float(result.parting.b) == pytest.approx(
        math.copysign(result.largest_gap, float(result.parting.a) - float(result.parting.b)), rel=1e-3
    )
    assert configurations(recorded, {}, {"dtype": "bfloat16"}, 1e6).parting is None


def test_one_side_that_cannot_be_built_is_an_error(recorded: Recorded) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda:99'"):
        configurations(recorded, {}, {"device": "cuda:99"})
    with pytest.raises(JournalError, match="begins with neither"):
        bisect_configurations(
            recorded.records[1:], replay_config(recorded.started), replay_config(recorded.started), 0.0
        )


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        ((1.0, 2.0), (1.0, 2.5), 0.5),
        ((math.nan, 1.0), (math.nan, 1.0), 0.0),
        ((math.nan, 1.0), (1.0, 1.0), math.inf),
        ((-math.inf, 1.0), (-math.inf, 1.0), 0.0),
        ((-math.inf, 1.0), (math.inf, 1.0), math.inf),
        ((), (), 0.0),
    ],
)
def test_the_gap_of_two_rows(a: tuple[float, ...], b: tuple[float, ...], gap: float) -> None:
    assert largest_gap(a, b) == gap
    if a:
        assert float(logit_gaps(torch.tensor([a]), torch.tensor([b])).amax()) == gap


def test_rows_of_other_lengths_are_infinitely_apart() -> None:
    assert largest_gap((1.0,), (1.0, 2.0)) == math.inf


def test_last_commands_of_ranks_are_held_against_one_another_by_what_each_heard(recorded: Recorded) -> None:
    """Such a file knows no requests and no tokens; what is missing there is no difference."""
    of_head = [each for each in recorded.records if isinstance(each, Commanded | Answered)]
    of_worker: list[Record] = [
        dataclasses.replace(each, rows=tuple(row._replace(request_id=0, samples=False) for row in each.rows))
        if isinstance(each, Commanded)
        else dataclasses.replace(each, kind="ok", rank=None, message="", answers=each.answers[1:2])
        for each in of_head
    ]
    assert bisect_journals(of_head, of_worker, TOLERANCE).parting is None
    assert bisect_journals(recorded.records, of_worker, TOLERANCE).parting is None
    index = next(
        i for i, each in enumerate(of_worker) if isinstance(each, Answered) and "blocks" in each.answers[0].witness
    )
    damaged = of_worker[index]
    assert isinstance(damaged, Answered)
    answer = dataclasses.replace(damaged.answers[0], witness={**damaged.answers[0].witness, "blocks": bytes(8)})
    of_worker[index] = dataclasses.replace(damaged, answers=(answer,))
    found = parting(of_head, of_worker)
    assert found.seq == damaged.seq
    assert "the block tables on its rank" in str(found)
