# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from bench import decode
from bench.cases.case import MARK
from bench.engines import EngineCase

LINE = MARK + json.dumps({"batch": 1, "decode": [2.0]})


def run(monkeypatch: pytest.MonkeyPatch, program: str, limit_s: float = 60.0) -> tuple[list[dict[str, object]], str]:
    monkeypatch.setattr(EngineCase, "command", lambda case, python, model: [sys.executable, "-c", program])
    args = argparse.Namespace(model=Path(), batch=[1], prompt=8, new=4, reps=1, threads=1, limit_s=limit_s)
    return decode._run(args, EngineCase("one", "one rank", "ours"))


def test_what_an_engine_found_is_read_from_among_its_other_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, f"print('loading'); print({LINE!r}); print('bye')")
    assert found == ([{"batch": 1, "decode": [2.0]}], "")


def test_an_engine_that_fails_leaves_what_it_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, f"print({LINE!r}, flush=True); raise SystemExit(3)")
    assert found == ([{"batch": 1, "decode": [2.0]}], "it ended with code 3")


def test_an_engine_that_hangs_is_killed_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found, failure = run(monkeypatch, "import signal; signal.pause()", limit_s=0.3)
    assert (found, failure) == ([], "it ended with code -9 after its 0.3 s")


def test_an_engine_is_not_told_a_number_of_threads_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    line = f"'{MARK}' + json.dumps(dict(batch=1, decode=[len(os.environ.get('OMP_NUM_THREADS', ''))]))"
    program = f"import json, os; print({line})"
    assert run(monkeypatch, program) == ([{"batch": 1, "decode": [0]}], "")
    assert os.environ["OMP_NUM_THREADS"] == "1"
