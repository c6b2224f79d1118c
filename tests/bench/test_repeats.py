# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import pytest

from bench.load import OtherLoad
from bench.repeats import percentile, repeat, spread, wait_quiet


class Loads:
    """A watch that sees so many cores in turn, and then none."""

    def __init__(self, *cores: float) -> None:
        self._cores: Iterator[float] = iter(cores)

    def __call__(self) -> OtherLoad:
        return Seen(next(self._cores, 0.0))


class Seen(OtherLoad):
    def __init__(self, cores: float) -> None:
        self._seen = cores

    def __enter__(self) -> OtherLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cores = self._seen


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_QUIET_S", "0")


def test_undisturbed_repeats_are_as_many_as_were_asked_for() -> None:
    numbers = iter(range(100))
    assert [one.value for one in repeat(lambda: next(numbers), 3, Loads())] == [0, 1, 2]


def test_a_disturbed_repeat_is_done_again_and_dropped() -> None:
    numbers = iter(range(100))
    kept = repeat(lambda: next(numbers), 3, Loads(0.0, 0.9, 0.1))
    assert sorted(one.value for one in kept) == [0, 2, 3]
    assert not any(one.is_disturbed for one in kept)


def test_where_it_never_gets_quiet_the_least_disturbed_are_kept_and_say_so() -> None:
    numbers = iter(range(100))
    kept = repeat(lambda: next(numbers), 2, Loads(0.9, 0.5, 0.7, 0.3))
    assert [(one.value, one.others, one.is_disturbed) for one in kept] == [(3, 0.3, True), (1, 0.5, True)]
    assert next(numbers) == 4


def test_quiet_is_waited_for_no_longer_than_the_limit() -> None:
    slept: list[float] = []
    assert not wait_quiet(2.0, Loads(*[0.9] * 100), slept.append)
    assert sum(slept) == 2.0


def test_quiet_ends_the_wait() -> None:
    slept: list[float] = []
    assert wait_quiet(60.0, Loads(0.9, 0.9, 0.01), slept.append)
    assert len(slept) == 3


def test_a_spread_is_the_median_with_the_lowest_and_the_highest() -> None:
    assert spread([3.0, 1.0, 2.0]).text(1) == "2.0 (1.0-3.0)"


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 95, 100)] == [1.0, 3.0, 4.0, 4.0]
