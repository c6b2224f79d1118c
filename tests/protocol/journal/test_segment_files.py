# SPDX-License-Identifier: MIT OR Apache-2.0
"""The files of one life: when a segment is due, when it is left, and that the bound holds at every moment."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random

import pytest

from metrale_ray.protocol.journal.lives import segments_of
from metrale_ray.protocol.journal.segment_files import PRUNE_S, SegmentFiles
from metrale_ray.protocol.journal.segments import HEAD_BYTES, MAGIC, SegmentReader

MAX_BYTES = 16_000
SEGMENT_BYTES = 2_000


class WallClock:
    """Seconds since 1970 that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_785_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


@pytest.fixture
def files(tmp_path: Path, clock: WallClock) -> Iterator[SegmentFiles]:
    with closing(SegmentFiles(tmp_path, MAX_BYTES, 8_000.0, None, clock)) as files:
        yield files


def num_bytes(folder: Path) -> int:
    """What all files in `folder` take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_is_put_is_in_the_file_once_it_is_flushed(files: SegmentFiles) -> None:
    files.put(b"one")
    files.put(b"two")
    (_, path) = segments_of(files.life)[0]
    assert list(SegmentReader(path)) == []
    files.flush()
    assert list(SegmentReader(path)) == [b"one", b"two"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_segment_is_due_when_it_is_full_and_a_new_one_is_not(files: SegmentFiles) -> None:
    assert files.is_fresh
    files.put(bytes(SEGMENT_BYTES - len(MAGIC) - HEAD_BYTES - 1))
    assert not files.is_due
    files.put(b"x")
    assert files.is_due
    files.roll()
    assert files.is_fresh
    assert not files.is_due
    assert [number for number, _ in segments_of(files.life)] == [1, 2]


def test_a_segment_is_due_at_an_eighth_of_the_age(files: SegmentFiles, clock: WallClock) -> None:
    files.put(b"x")
    clock.now_s += 999
    assert not files.is_due
    clock.now_s += 1
    assert files.is_due


def test_a_segment_that_nobody_leaves_is_left_before_it_has_twice_its_size(files: SegmentFiles) -> None:
    for _ in range(5):
        files.put(bytes(1_000))
    files.flush()
    assert [path.stat().st_size < 2 * SEGMENT_BYTES for _, path in segments_of(files.life)] == [True, True]
    assert files.is_due, "the new one has no snapshot"
    files.roll()
    assert not files.is_due


def test_the_largest_payload_fits_into_a_segment_alone(files: SegmentFiles) -> None:
    files.put(bytes(files.largest_payload_bytes))
    files.flush()
    (_, path) = segments_of(files.life)[0]
    assert path.stat().st_size == 2 * SEGMENT_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_all_files_stay_below_the_bound_at_every_moment(files: SegmentFiles, tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    for _ in range(150):
        files.put(bytes(draw.randint(1, files.largest_payload_bytes)))
        if draw.random() < 0.2:
            files.roll()
        files.flush()
        assert num_bytes(tmp_path) <= MAX_BYTES
    assert num_bytes(tmp_path) > MAX_BYTES / 3, "nothing is removed that had room"


def test_two_lives_in_one_folder_stay_below_the_bound_and_both_can_go_on(tmp_path: Path, clock: WallClock) -> None:
    with ExitStack() as stack:
        both = [SegmentFiles(tmp_path, MAX_BYTES, 1e6, None, clock) for _ in range(2)]
        for files in both:
            stack.callback(files.close)
        for turn in range(120):
            files = both[turn % 2]
            files.put(bytes(700))
            files.flush()
            # The segment that the other one writes can grow by what is its own right.
            assert num_bytes(tmp_path) <= MAX_BYTES + 2 * SEGMENT_BYTES
        for files in both:
            assert list(SegmentReader(segments_of(files.life)[-1][1]))


def test_the_folder_is_looked_through_again_after_a_while_and_after_the_clock_was_set_back(
    files: SegmentFiles, clock: WallClock
) -> None:
    assert not files.is_prune_due
    clock.now_s += PRUNE_S
    assert files.is_prune_due
    files.prune()
    clock.now_s -= 1
    assert files.is_prune_due


def test_very_much_in_one_batch_is_written_as_it_comes(tmp_path: Path, clock: WallClock) -> None:
    with closing(SegmentFiles(tmp_path, 2**28, 1e6, None, clock)) as files:
        for _ in range(3):
            files.put(bytes(2**20))
        (_, path) = segments_of(files.life)[0]
        assert path.stat().st_size > 3 * 2**20


def test_a_file_that_was_removed_is_noticed_at_the_next_flush(files: SegmentFiles) -> None:
    segments_of(files.life)[0][1].unlink()
    files.put(b"x")
    with pytest.raises(FileNotFoundError, match="removed"):
        files.flush()


def test_a_life_that_cannot_open_its_segment_lets_its_lock_go(
    tmp_path: Path, clock: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SegmentFiles) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(SegmentFiles, "roll", refuse)
        with pytest.raises(OSError, match="No space left"):
            SegmentFiles(tmp_path, MAX_BYTES, 1e6, None, clock)
    with closing(SegmentFiles(tmp_path, MAX_BYTES, 1e6, None, clock)) as files:
        assert [path for path in tmp_path.iterdir() if path.is_dir()] == [files.life], "the empty life is removed"
