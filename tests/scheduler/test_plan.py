# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/plan.py`: which command runs which rows."""

from __future__ import annotations

import pytest

from metrale_ray.errors import ProtocolError
from metrale_ray.protocol.commands import Decode, DecodeBatch, Logits, MixedStep, PrefillChunk
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.scheduler.plan import PlanRow, plan_command
from tests.scheduler.scheduler_cases import a_row

DECODE, CHUNK, TAIL = a_row(0), a_row(1, 0, 5), a_row(2, 4, 5, Logits.NONE)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([DECODE], Decode),
        ([DECODE, a_row(3)], DecodeBatch),
        ([CHUNK], PrefillChunk),
        ([TAIL], PrefillChunk),
        ([a_row(0, start=0)], PrefillChunk),
        ([a_row(0, logits=Logits.ALL)], PrefillChunk),
        ([a_row(0, logits=Logits.NONE)], PrefillChunk),
        ([CHUNK, TAIL], MixedStep),
        ([DECODE, CHUNK], MixedStep),
    ],
)
def test_rows_become_the_narrowest_command_that_can_say_them(rows: list[PlanRow], kind: type) -> None:
    command = plan_command(rows, ProtocolVersion.V2)
    assert type(command) is kind
    spans = getattr(command, "rows", None) or (command.row,)  # type: ignore[union-attr]
    assert spans == tuple(row.span for row in rows)


def test_v1_has_one_row_in_slot_zero() -> None:
    assert plan_command([DECODE], ProtocolVersion.V1) == Decode(DECODE.span)
    assert plan_command([a_row(0, 0, 5)], ProtocolVersion.V1) == PrefillChunk(a_row(0, 0, 5).span)
    for rows in ([DECODE, CHUNK], [CHUNK]):
        with pytest.raises(ProtocolError, match="v1 runs one row, in slot 0"):
            plan_command(rows, ProtocolVersion.V1)


def test_no_rows_are_no_command() -> None:
    with pytest.raises(ProtocolError, match="without rows"):
        plan_command([], ProtocolVersion.V2)
