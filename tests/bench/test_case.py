# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import pytest

from bench.cases.case import MARK, Run, case_parser, measure, run_of
from bench.prompts import FIRST_WORD, VOCAB_SIZE, prompts


def test_decode_begins_when_the_last_sequence_has_its_first_token() -> None:
    assert run_of([[1.0, 2.0, 4.0], [3.0, 5.0]], began_s=0.5) == Run(2.5, 2.0, 2)


def test_a_row_is_the_same_in_every_batch() -> None:
    assert prompts(8, 16)[:2] == prompts(2, 16)
    assert len(set(map(tuple, prompts(8, 16)))) == 8
    assert all(FIRST_WORD <= token < VOCAB_SIZE for token in prompts(1, 500)[0])


def test_what_a_case_prints_is_one_line_with_its_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCH_QUIET_S", "0")
    asked: list[tuple[int, int]] = []

    def once(rows: Sequence[Sequence[int]], new: int) -> Run:
        asked.append((len(rows), new))
        return Run(0.5, 2.0, 100)

    args = argparse.Namespace(**{**vars(case_parser("").parse_args(["model", "--reps", "1"])), "prompt": 10, "new": 51})
    measure(args, 2, once, lambda: {"more": 1})
    found = json.loads(capsys.readouterr().out.removeprefix(MARK))
    assert (found["batch"], found["more"]) == (2, 1)
    assert set(found["prefill"]) == {40.0}
    assert set(found["decode"]) == {50.0}
    assert asked[0] == (2, 4)  # the warm-up
    assert set(asked[1:]) == {(2, 51)}
