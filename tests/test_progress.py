# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a person sees where there is no terminal: lines, few and plain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from metrale_ray.head import HeadState
from metrale_ray.progress import LoadProgress, counted
from metrale_ray.protocol.commands import Progress


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


def test_a_load_says_how_far_each_rank_is(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(2) as progress:
        for done in range(1, 5):
            progress.update(HeadState("loading", {r: Progress(done << 20, 9 << 20) for r in range(2)}))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loading: rank 0: 2/9 MiB, rank 1: 2/9 MiB" in captured.err
    assert len(captured.err.splitlines()) == 2  # one in five seconds, not one for each of four looks


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
