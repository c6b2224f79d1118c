# SPDX-License-Identifier: MIT OR Apache-2.0
"""The folder of journals: lives of one second, locks, and what is removed so that bounds hold."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from metrale_ray.protocol.journal import lives
from metrale_ray.protocol.journal.lives import LOCK_NAME, Life, lives_of, prune, segments_of, stamp
from metrale_ray.protocol.journal.segments import segment_name

NOW_S = 1_785_000_000.0


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """Closes at the end what a test leaves open."""
    with ExitStack() as stack:
        yield stack


def begin(folder: Path, ends: ExitStack, num_segments: int = 0, num_bytes: int = 100) -> Life:
    """A life that is written, with so many segments."""
    life = Life.begin(folder, NOW_S)
    ends.callback(life.close)
    for number in range(1, num_segments + 1):
        store(life.path / segment_name(number), NOW_S + number, num_bytes)
    return life


def store(path: Path, written_s: float, num_bytes: int = 100) -> Path:
    """A file that was written last at a time."""
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (written_s, written_s))
    return path


def names(folder: Path) -> list[str]:
    """All files in `folder`, without locks."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_a_life_is_for_this_user_only_and_so_is_the_folder_that_is_made_for_it(tmp_path: Path, ends: ExitStack) -> None:
    life = begin(tmp_path / "a" / "b", ends)
    assert life.path.name == f"{stamp(NOW_S)}-{os.getpid()}"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a" / "b", life.path)] == [0o700, 0o700]
    assert stat.S_IMODE((life.path / LOCK_NAME).stat().st_mode) == 0o600


def test_lives_of_the_same_second_get_names_of_their_own(tmp_path: Path, ends: ExitStack) -> None:
    found = [begin(tmp_path, ends).path for _ in range(3)]
    assert sorted(found) == lives_of(tmp_path)
    assert [path.name.removeprefix(found[0].name) for path in found] == ["", "-2", "-3"]


def test_a_folder_with_too_many_namesakes_is_an_error(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "MAX_NAMESAKES", 2)
    begin(tmp_path, ends)
    begin(tmp_path, ends)
    with pytest.raises(FileExistsError):
        begin(tmp_path, ends)


def test_the_oldest_go_first_whoever_wrote_them_until_the_bound_holds(tmp_path: Path, ends: ExitStack) -> None:
    old, new = begin(tmp_path, ends, 3), begin(tmp_path, ends, 3)
    old.close()
    assert prune(tmp_path, 350, 0) == 300
    left = [f"{old.path.name}/000003.journal", *(f"{new.path.name}/00000{number}.journal" for number in (2, 3))]
    assert names(tmp_path) == sorted(left)


def test_the_last_segment_of_a_life_that_is_written_stays_whatever_the_bound(tmp_path: Path, ends: ExitStack) -> None:
    mine, other = begin(tmp_path, ends, 2), begin(tmp_path, ends, 2)
    assert prune(tmp_path, 0, NOW_S * 2) == 200
    assert names(tmp_path) == sorted(f"{life.path.name}/000002.journal" for life in (mine, other))


def test_when_its_process_has_ended_all_of_a_life_may_go_and_its_folder_too(tmp_path: Path, ends: ExitStack) -> None:
    life = begin(tmp_path, ends, 2)
    life.close()
    life.close()
    assert prune(tmp_path, 0, 0) == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_too_old_goes_though_there_is_room(tmp_path: Path, ends: ExitStack) -> None:
    life = begin(tmp_path, ends, 3)
    assert prune(tmp_path, 10**9, NOW_S + 2) == 200
    assert [number for number, _ in segments_of(life.path)] == [2, 3]


def test_dumps_count_and_go_as_segments_do(tmp_path: Path, ends: ExitStack) -> None:
    begin(tmp_path, ends, 2)
    store(tmp_path / "20260801T000000Z-desync.dump", NOW_S - 5)
    store(tmp_path / "20260801T000001Z-desync.dump", NOW_S + 50)
    assert prune(tmp_path, 300, 0) == 300
    assert not (tmp_path / "20260801T000000Z-desync.dump").exists()
    assert (tmp_path / "20260801T000001Z-desync.dump").exists()


def test_the_dumps_of_each_rank_count_too(tmp_path: Path, ends: ExitStack) -> None:
    begin(tmp_path, ends, 1)
    for rank in range(3):
        (tmp_path / "incidents" / f"rank-{rank}").mkdir(parents=True)
        store(tmp_path / "incidents" / f"rank-{rank}" / "20260801T000000Z-desync.dump", NOW_S + 10 * rank)
    assert prune(tmp_path, 10**9, NOW_S + 5) == 300
    assert prune(tmp_path, 200, 0) == 200
    assert [name for name in names(tmp_path) if "rank" in name] == ["incidents/rank-2/20260801T000000Z-desync.dump"]


def test_what_is_not_of_a_journal_is_left_alone(tmp_path: Path, ends: ExitStack) -> None:
    life = begin(tmp_path, ends, 1)
    life.close()
    store(life.path / "notes.txt", NOW_S)
    store(tmp_path / "000001.journal.bak", NOW_S)
    store(tmp_path / "backup.dump", NOW_S)
    (tmp_path / "mine").mkdir()
    store(tmp_path / "mine" / "000001.journal", NOW_S)
    prune(tmp_path, 0, NOW_S * 2)
    assert names(tmp_path) == [
        "000001.journal.bak",
        f"{life.path.name}/notes.txt",
        "backup.dump",
        "mine/000001.journal",
    ]


def test_a_folder_without_a_lock_is_a_life_that_begins_unless_it_is_old(tmp_path: Path) -> None:
    young, old = tmp_path / "20260801T000000Z-1", tmp_path / "20260801T000000Z-2"
    young.mkdir()
    old.mkdir()
    os.utime(old, (time.time() - 2 * lives.UNLOCKED_S,) * 2)
    prune(tmp_path, 0, 0)
    assert (young.exists(), old.exists()) == (True, False)


def test_a_link_to_another_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store(elsewhere / segment_name(1), NOW_S)
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "20260801T000000Z-1").symlink_to(elsewhere)
    prune(tmp_path / "j", 0, NOW_S * 2)
    assert (elsewhere / segment_name(1)).exists()


def test_a_file_that_cannot_be_removed_is_told_and_the_others_go(
    tmp_path: Path, ends: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = begin(tmp_path, ends, 3)
    stuck, unlink = life.path / segment_name(1), Path.unlink

    def guarded(path: Path, missing_ok: bool = False) -> None:
        if path == stuck:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", guarded)
    with caplog.at_level(logging.WARNING):
        assert prune(tmp_path, 0, 0) == 200
    assert f"cannot remove {stuck}" in caplog.text
    assert [number for number, _ in segments_of(life.path)] == [1, 3]
