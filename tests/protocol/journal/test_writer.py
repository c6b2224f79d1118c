# SPDX-License-Identifier: MIT OR Apache-2.0
"""The writer: what is noted is in the files, whatever the disk does the one who notes is not held up."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from metrale_ray.errors import ConfigError, JournalError
from metrale_ray.protocol.journal import writer as writer_module
from metrale_ray.protocol.journal.journal import Journal, JournalState
from metrale_ray.protocol.journal.lives import lives_of, prune, segments_of
from metrale_ray.protocol.journal.reader import open_journal
from metrale_ray.protocol.journal.records import (
    Closed,
    Commanded,
    Gap,
    ReadRecord,
    Record,
    Snapshot,
    Started,
)
from metrale_ray.protocol.journal.segment_files import SegmentFiles
from metrale_ray.protocol.journal.writer import JournalWriter
from tests.protocol.journal import noting_process
from tests.protocol.journal.samples import LIFE, SNAPSHOT, STARTED, commanded

WAIT_S = 30.0


class Make(Protocol):
    """Begins a journal in the test's folder."""

    def __call__(self, **settings: Any) -> JournalWriter: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def begin(**settings: Any) -> JournalWriter:
            chosen = {"max_bytes": 2**20, "max_age_s": 1e6, "redact": False, **settings}
            journal = JournalWriter(tmp_path / "j", **chosen)
            stack.callback(journal.close, "the test's end", None)
            return journal

        yield begin


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk hangs until it is set."""
    opened, flush = threading.Event(), SegmentFiles.flush

    def hanging(files: SegmentFiles) -> None:
        opened.wait(WAIT_S)
        flush(files)

    monkeypatch.setattr(SegmentFiles, "flush", hanging)
    yield opened
    opened.set()


def records_of(journal: JournalWriter) -> list[ReadRecord]:
    """What is in the files, once all of it is written."""
    journal.close("read", None)
    return list(open_journal(journal.life))


def until(done: Callable[[], bool]) -> None:
    """Wait for another thread, a moment at a time."""
    pause = threading.Event()
    for _ in range(round(WAIT_S / 0.005)):
        if done():
            return
        pause.wait(0.005)
    raise AssertionError("it does not come")


def test_everything_noted_is_read_back_and_the_end_behind_it(make: Make) -> None:
    journal = make()
    assert isinstance(as_journal(journal), JournalWriter)
    for record in LIFE:
        journal.note(record)
    journal.close("asked to", "no failure")
    *found, end = open_journal(journal.life)
    assert tuple(found) == LIFE
    assert isinstance(end, Closed)
    assert (end.reason, end.failure, journal.is_on, journal.failure) == ("asked to", "no failure", False, None)


def as_journal(journal: Journal) -> Journal:
    """For the type checker: a writer is one."""
    return journal


def test_what_was_noted_is_written_before_the_end_too(make: Make) -> None:
    journal = make()
    for record in LIFE[:3]:
        journal.note(record)
    until(lambda: list(open_journal(journal.life)) == list(LIFE[:3]))


def test_what_is_noted_for_later_is_made_by_the_writers_thread_in_its_place(make: Make) -> None:
    journal, makers = make(), set()

    def later(record: Record) -> Callable[[], Record]:
        def made() -> Record:
            makers.add(threading.current_thread().name)
            return record

        return made

    for index, record in enumerate(LIFE[:-1]):
        if index % 2:
            journal.note_later(later(record), 100)
        else:
            journal.note(record)
    assert tuple(records_of(journal)[:-1]) == LIFE[:-1]
    assert makers == {"journal"}


def test_a_record_that_cannot_be_made_costs_that_record_alone(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    journal = make()

    def failing() -> Record:
        raise RuntimeError("the GPU is gone")

    journal.note(STARTED)
    journal.note_later(failing, 100)
    journal.note(commanded(1))
    kinds = [type(record) for record in records_of(journal)]
    assert kinds == [Started, Gap, Commanded, Closed]
    assert "the GPU is gone" in caplog.text


def test_what_waits_to_be_made_counts_by_the_bytes_that_it_says(
    make: Make, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 1000)
    journal = make()
    for seq in range(1, 9):
        journal.note_later(partial(commanded, seq), 400)
    gate.set()
    found = records_of(journal)
    assert (
        sum(record.num_records for record in found if isinstance(record, Gap))
        + len([record for record in found if isinstance(record, Commanded)])
        == 8
    )
    assert any(isinstance(record, Gap) for record in found)


def test_times_of_the_writers_own_records_count_from_the_start(make: Make) -> None:
    now_s = [50.0]
    journal = make(clock=lambda: now_s[0])
    now_s[0] = 60.0
    journal.note(STARTED)
    now_s[0] = 62.5
    assert records_of(journal)[-1] == Closed(2_500_000, "read", None)


def test_after_the_end_nothing_more_is_written(make: Make) -> None:
    journal = make()
    journal.note(STARTED)
    before = records_of(journal)
    journal.note(commanded(1))
    journal.close("again", None)
    assert records_of(journal) == before
    assert not journal.wants_snapshot()


def test_files_are_for_this_user_only(make: Make) -> None:
    journal = make()
    journal.note(STARTED)
    journal.close("end", None)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (journal.life, segments_of(journal.life)[0][1])]
    assert modes == [0o700, 0o600]


def test_a_full_segment_asks_for_a_snapshot_which_begins_the_next_one(make: Make) -> None:
    journal = make(segment_bytes=1_000)
    journal.note(STARTED)
    assert not journal.wants_snapshot()
    for seq in range(1, 7):
        journal.note(commanded(seq))
    until(journal.wants_snapshot)
    journal.note(SNAPSHOT)
    assert not journal.wants_snapshot()
    journal.note(commanded(7))
    journal.close("end", None)
    first, second = (list(open_journal(path)) for _, path in segments_of(journal.life))
    assert first == [STARTED, *map(commanded, range(1, 7))]
    assert second[:2] == [SNAPSHOT, commanded(7)]


def test_a_snapshot_that_is_queued_is_not_asked_for_again(make: Make, gate: threading.Event) -> None:
    journal = make(segment_bytes=1_000)
    journal.note(STARTED)
    for seq in range(1, 7):
        journal.note(commanded(seq))
    gate.set()
    until(journal.wants_snapshot)
    gate.clear()
    journal.note(commanded(7))  # in the hands of the thread, which hangs
    until(lambda: not journal._queue)
    journal.note(SNAPSHOT)
    gate.set()
    journal.close("end", None)
    assert [type(next(iter(open_journal(path)))) for _, path in segments_of(journal.life)] == [Started, Snapshot]


def test_a_snapshot_at_the_very_beginning_opens_no_second_segment(make: Make) -> None:
    journal = make()
    journal.note(SNAPSHOT)
    assert records_of(journal)[0] == SNAPSHOT
    assert len(segments_of(journal.life)) == 1


def test_where_nobody_gives_a_snapshot_the_bound_holds_all_the_same(make: Make, tmp_path: Path) -> None:
    journal = make(max_bytes=100_000)
    journal.note(STARTED)
    for seq in range(1, 3_000):
        journal.note(commanded(seq))
    journal.close("end", None)
    found = open_journal(journal.life)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.journal")) <= 100_000
    assert found.missing == ()
    seqs = [record.seq for record in found if isinstance(record, Commanded)]
    assert seqs == list(range(seqs[0], 3_000))
    assert seqs[0] > 1


def test_a_disk_that_hangs_costs_records_which_one_gap_counts_and_never_holds_up_who_notes(
    make: Make, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 50_000)
    journal = make()
    journal.note(STARTED)
    until(lambda: not journal._queue)
    for seq in range(1, 501):
        journal.note(commanded(seq, 1_000))
    num_queued = len(journal._queue)
    assert 0 < num_queued < 60
    with caplog.at_level(logging.WARNING):
        gate.set()
        until(journal.wants_snapshot)
    journal.note(SNAPSHOT)
    journal.note(commanded(501))
    found = records_of(journal)
    kept = [commanded(seq, 1_000) for seq in range(1, num_queued + 1)]
    gap = found[num_queued + 1]
    assert isinstance(gap, Gap)
    assert gap.num_records == 500 - num_queued
    assert journal.state() == JournalState(False, None, 500 - num_queued)
    assert [*found[: num_queued + 1], *found[num_queued + 2 : -1]] == [STARTED, *kept, SNAPSHOT, commanded(501)]
    assert caplog.text.count("records were let go") == 1


def test_once_one_record_was_let_go_all_are_until_the_queue_is_written(
    make: Make, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 5_000)
    journal = make()
    journal.note(STARTED)
    until(lambda: not journal._queue)
    for record in (commanded(1, 3_000), commanded(2, 3_000), commanded(3, 1), SNAPSHOT):
        journal.note(record)
    gate.set()
    found = records_of(journal)
    assert found[:2] == [STARTED, commanded(1, 3_000)]
    assert [type(record) for record in found[2:]] == [Gap, Closed]
    assert isinstance(found[2], Gap)
    assert found[2].num_records == 3


def test_a_record_larger_than_the_queue_is_taken_when_the_queue_is_empty(
    make: Make, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 1_000)
    gate.set()
    journal = make()
    journal.note(commanded(1, 50_000))
    assert records_of(journal)[0] == commanded(1, 50_000)


def test_a_record_that_cannot_be_written_becomes_a_gap_with_a_line_in_the_log(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    journal = make(clock=lambda: 7.0)
    with caplog.at_level(logging.WARNING):
        for record in (STARTED, dataclasses.replace(commanded(2), seq=2**64), commanded(3, 2**20), commanded(4)):
            journal.note(record)
        found = records_of(journal)
    assert found[:-1] == [STARTED, Gap(0, 1), Gap(0, 1), commanded(4)]
    assert caplog.text.count("is left out (Commanded)") == 2
    assert "1048" in caplog.text


def test_a_snapshot_too_large_for_the_bound_is_not_asked_for_again_at_once(make: Make) -> None:
    journal = make(segment_bytes=2_000)
    large = dataclasses.replace(
        SNAPSHOT, live=tuple(dataclasses.replace(SNAPSHOT.live[0], tokens=tuple(range(900))) for _ in range(9))
    )
    journal.note(STARTED)
    journal.note(large)
    until(lambda: len(segments_of(journal.life)) == 2 and not journal._queue)
    journal.note(commanded(1))
    assert not journal.wants_snapshot()
    assert [type(record) for record in records_of(journal)] == [Started, Gap, Commanded, Closed]


def test_what_is_no_record_at_all_is_a_gap_too(make: Make) -> None:
    journal = make(clock=lambda: 7.0)
    nothing: Any = object()
    journal.note(nothing)
    journal.note(STARTED)
    assert records_of(journal) == [Gap(0, 1), STARTED, Closed(0, "read", None)]


def test_a_full_disk_switches_the_journal_off_with_one_line(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    journal = make()
    journal.note(STARTED)
    until(lambda: segments_of(journal.life)[0][1].stat().st_size > 8)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._files._file)
    os.close(full)
    with caplog.at_level(logging.ERROR):
        for seq in range(1, 4):
            journal.note(commanded(seq))
        until(lambda: not journal.is_on)
        for seq in range(4, 8):
            journal.note(commanded(seq))
        journal.close("end", None)
    assert journal.failure == f"the journal in {journal.life} is off: No space left on device"
    assert [record.message for record in caplog.records] == [f"{journal.failure}; the engine goes on without it"]
    assert list(open_journal(journal.life)) == [STARTED]
    assert not journal.wants_snapshot()


def test_a_write_that_ends_in_the_middle_leaves_a_torn_record(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = make()
    journal.note(STARTED)
    until(lambda: segments_of(journal.life)[0][1].stat().st_size > 8)
    write, is_full = os.write, []

    def filling(file: int, data: Any) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        is_full.append(True)
        return write(file, bytes(data)[: len(data) - 20])

    monkeypatch.setattr(os, "write", filling)
    journal.note(commanded(1))
    until(lambda: not journal.is_on)
    monkeypatch.undo()
    found = open_journal(journal.life)
    assert (list(found), found.torn) == ([STARTED], True)


@pytest.mark.parametrize("what", ["folder", "life"])
def test_a_folder_that_vanishes_switches_the_journal_off(make: Make, tmp_path: Path, what: str) -> None:
    journal = make()
    journal.note(STARTED)
    until(lambda: not journal._queue)
    shutil.rmtree(tmp_path / "j" if what == "folder" else journal.life)
    journal.note(commanded(1))
    until(lambda: not journal.is_on)
    assert "its file has been removed" in (journal.failure or "")


def test_a_mistake_in_the_thread_switches_the_journal_off_and_says_so(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    journal = make()
    odd: Any = dataclasses.replace(SNAPSHOT, started=None)
    journal.note(odd)
    journal._thread.join(WAIT_S)
    assert not journal.is_on
    assert (journal.failure or "").endswith("its thread has ended")
    assert [arguments.exc_type for arguments in hooked] == [AttributeError]


def test_a_disk_that_never_comes_back_does_not_hold_up_the_end(
    make: Make, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "CLOSE_S", 0.01)
    journal = make()
    journal.note(STARTED)
    journal.close("end", None)
    assert "it may be torn" in caplog.text
    gate.set()
    journal._thread.join(WAIT_S)
    assert isinstance(list(open_journal(journal.life))[-1], Closed)


@pytest.mark.parametrize("place", ["file", "file/below", "closed/new"])
def test_a_folder_that_cannot_be_written_is_an_error_at_the_start_with_its_reason(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    if place == "closed/new":  # root may write everywhere

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied", str(tmp_path / place))

        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"journal is .*which cannot be written: .*give a folder") as caught:
        JournalWriter(tmp_path / place, max_bytes=2**20, max_age_s=1e6, redact=False)
    assert str(tmp_path / place) in caught.value.message


def noting(folder: Path, number: int, last: int) -> subprocess.Popen[str]:
    """A process that says when it has noted so many commands, and goes on to the last one."""
    command = [sys.executable, "-m", "tests.protocol.journal.noting_process", str(folder), str(number), str(last)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def life_of(process: subprocess.Popen[str]) -> Path:
    """The folder of its journal, once it has noted what it should."""
    return Path((process.stdout or sys.stdin).readline().strip())


def check_commands(life: Path) -> list[int]:
    """The numbers of the commands in a life's journal, which follow one another."""
    journal = open_journal(life)
    numbers = [record.seq for record in journal if isinstance(record, Commanded)]
    assert journal.missing == ()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return numbers


def has_written(life: Path, last: Commanded) -> bool:
    """Whether `last` is the last record there."""
    try:
        return list(open_journal(segments_of(life)[-1][1]))[-1:] == [last]
    except JournalError:  # the segment went meanwhile
        return False


def num_bytes(folder: Path) -> int:
    """What the segments in `folder` take."""
    return sum(path.stat().st_size for path in folder.rglob("*.journal"))


@pytest.mark.processes
def test_of_a_writer_that_is_killed_all_that_it_wrote_can_be_read_and_its_life_may_go(tmp_path: Path) -> None:
    with noting(tmp_path, 20, 10**9) as process:
        life = life_of(process)
        until(lambda: num_bytes(life) > 100_000)
        process.kill()
    assert len(check_commands(life)) > 10
    prune(tmp_path, 0, 0)
    assert lives_of(tmp_path) == []


@pytest.mark.processes
def test_two_processes_share_a_folder_and_neither_removes_what_the_other_one_writes(tmp_path: Path) -> None:
    with noting(tmp_path, 170, 170) as one, noting(tmp_path, 170, 170) as two:
        lives = [life_of(process) for process in (one, two)]
        until(lambda: all(has_written(life, commanded(170, 8_000)) for life in lives))
        assert lives_of(tmp_path) == sorted(lives)
        assert min(check_commands(life)[0] for life in lives) > 1, "old segments made room"
        # What the other process writes may grow to a quarter of the bound without being asked.
        assert num_bytes(tmp_path) <= noting_process.MAX_BYTES * 5 / 4
        for process in (one, two):
            process.communicate("")
    assert [process.returncode for process in (one, two)] == [0, 0]
