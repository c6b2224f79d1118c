# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a person sees where there is no terminal: lines, few and plain."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from metrale_ray.head import HeadState
from metrale_ray.progress import LoadProgress, counted, phases
from metrale_ray.protocol.commands import Progress
from tests.test_head import until


class Clock:
    """A clock that goes on by three seconds at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 3.0
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metrale_ray.progress.time", SimpleNamespace(monotonic=Clock()))


def test_a_start_says_that_it_goes_on_and_how_far_each_rank_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metrale_ray.progress.LOG_EVERY_S", 0.01)
    said = ""

    def has_said(text: str) -> bool:
        nonlocal said
        captured = capsys.readouterr()
        assert captured.out == ""
        said += captured.err
        return text in said

    with LoadProgress(2) as progress:
        until(lambda: has_said("starting 2 ranks, "))
        progress.update(HeadState("loading", {r: Progress(2 << 20, 9 << 20) for r in range(2)}))
        until(lambda: has_said("loading: rank 0: 2/9 MiB, rank 1: 2/9 MiB, "))
    capsys.readouterr()
    assert "load-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_quick_start_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(2) as progress:
        progress.update(HeadState("starting", {}))
        progress.update(HeadState("ready", {}))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("total", "shown", "lines"), [(9, True, True), (9, False, False), (1, True, False)])
def test_many_things_are_counted_when_that_is_wanted(
    capsys: pytest.CaptureFixture[str], total: int, shown: bool, lines: bool
) -> None:
    with counted(total, "prompts", shown=shown) as advance:
        for _ in range(total):
            advance()
    assert ("of 9 prompts" in capsys.readouterr().err) is lines


def test_work_of_several_phases_says_which_it_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    with phases() as update:
        for done in range(1, 5):
            update("loading", done, 4)
        update("replaying", 0, 0)
        update("replaying", 1, 2)
    err = capsys.readouterr().err
    assert "loading: 50 %\n" in err
    assert "replaying: " in err
    assert len(err.splitlines()) < 6
