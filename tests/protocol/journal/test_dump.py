# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dumps: a few records in a file of their own."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.protocol.journal.dump import MAX_DUMPS, write_dump
from metrale_ray.protocol.journal.reader import open_journal
from metrale_ray.protocol.journal.records import Commanded, Gap
from tests.protocol.journal.samples import COMMANDED, LIFE, STARTED, commanded


def now() -> float:
    """A wall clock that stands still."""
    return 1_785_672_000.0


def test_a_dump_is_read_as_a_journal_is_and_is_for_this_user_only(tmp_path: Path) -> None:
    path = write_dump(tmp_path / "made", "desync", LIFE, redact=False, wall_clock=now)
    journal = open_journal(path)
    assert tuple(journal) == LIFE
    assert (journal.torn, journal.missing, journal.first_seq) == (False, (), 1)
    assert path == tmp_path / "made" / "20260802T120000Z-desync.dump"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_dump_may_be_redacted(tmp_path: Path) -> None:
    path = write_dump(tmp_path, "desync", LIFE, redact=True)
    records = list(open_journal(path))
    assert records[0] == dataclasses.replace(STARTED, redacted=True)
    assert [record.data for record in records if isinstance(record, Commanded)] == [None, None]
    assert (COMMANDED.data or b"?") not in path.read_bytes()


def test_dumps_of_one_second_are_all_kept_and_of_many_the_newest(tmp_path: Path) -> None:
    paths = []
    for number in range(MAX_DUMPS + 5):
        path = write_dump(tmp_path, "lost", [commanded(number)], redact=False, wall_clock=now)
        os.utime(path, (number, number))
        paths.append(path)
    left = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
    assert len(left) == MAX_DUMPS
    assert [list(open_journal(path)) for path in left[-3:]] == [
        [commanded(number)] for number in range(MAX_DUMPS + 2, MAX_DUMPS + 5)
    ]


def test_files_of_others_that_end_as_dumps_do_stay(tmp_path: Path) -> None:
    (tmp_path / "backup.dump").touch()
    for _ in range(MAX_DUMPS + 1):
        write_dump(tmp_path, "lost", [STARTED], redact=False, wall_clock=now)
    assert (tmp_path / "backup.dump").exists()


def test_a_record_that_cannot_be_packed_becomes_a_gap(tmp_path: Path) -> None:
    odd: Any = dataclasses.replace(COMMANDED, rows=object())
    assert list(open_journal(write_dump(tmp_path, "x", [STARTED, odd], redact=False))) == [STARTED, Gap(12, 1)]


def test_a_folder_that_cannot_be_made_is_an_error_and_nothing_is_left_of_a_dump_that_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_dump(tmp_path / "file", "x", LIFE, redact=False)
    with pytest.raises(OSError, match="a/b"):
        write_dump(tmp_path, "a/b", LIFE, redact=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
