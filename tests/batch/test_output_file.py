# SPDX-License-Identifier: MIT OR Apache-2.0
"""OUTPUT: what a killed run leaves is mended, what others wrote is left alone, and one run has it at a time."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.batch import output_file
from metrale_ray.batch.line import key
from metrale_ray.batch.output_file import REST_NAME, SYNC_S, OutputFile
from metrale_ray.batch.record import START, answer_line
from metrale_ray.errors import UserError

OK, BAD = 200, 400


def line(custom_id: str, status: int = OK) -> bytes:
    return answer_line(custom_id, status, "r", b'{"usage":{}}')


LINES = [line(custom_id, status) for custom_id, status in (("a", OK), ("b", BAD), ("c", OK))]
IDS = [key(None, custom_id, None) for custom_id in "abc"]


@contextmanager
def opened(path: Path) -> Iterator[OutputFile]:
    file = OutputFile(path)
    try:
        yield file
    finally:
        file.close()


def keys_in(path: Path) -> list[bytes]:
    with opened(path) as file:
        return [record.key for record in file.records()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_what_was_written_is_there_and_read_again(path: Path) -> None:
    with opened(path) as file:
        assert list(file.records()) == []
        for data in LINES:
            file.append(data)
            assert path.read_bytes().endswith(data)  # at once
    assert path.read_bytes() == b"".join(LINES)
    assert keys_in(path) == IDS
    with opened(path) as file:
        file.append(line("d"))
    assert keys_in(path) == [*IDS, key(None, "d", None)]


def test_whatever_is_left_of_a_last_line_is_cut_off_and_no_whole_line_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path, data = tmp_path_factory.mktemp("cut") / "out.jsonl", b"".join(LINES)

    @given(st.integers(0, len(data)))
    def check(size: int) -> None:
        path.write_bytes(data[:size])
        num_whole = sum(data[:size].startswith(b"".join(LINES[: count + 1])[:-1]) for count in range(3))
        assert keys_in(path) == IDS[:num_whole]
        assert (path.read_bytes() if num_whole else b"") == b"".join(LINES[:num_whole])

    check()


def test_what_a_machine_without_power_leaves_is_cut_off(path: Path) -> None:
    path.write_bytes(LINES[0] + bytes(4096))
    assert keys_in(path) == IDS[:1]
    assert path.read_bytes() == LINES[0]


def test_empty_lines_are_nothing(path: Path) -> None:
    path.write_bytes(b"\n" + LINES[0] + b"\n\n" + LINES[1])
    assert keys_in(path) == IDS[:2]


@pytest.mark.parametrize(
    "data",
    [
        b"a text of mine",
        b"a text of mine\n",
        b'{"prompt": "x"}\n',
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n',
        LINES[0] + b"a note of mine",
        LINES[0] + b"a note of mine\n" + LINES[1],
        START[:10] + b"\n" + LINES[1],
        LINES[0][:-9] + b"\nmore\nof this",
        bytes(4096) + b"a picture\nof mine",
        LINES[0] + bytes(4096) + b"a note of mine",
    ],
)
def test_a_file_that_holds_something_else_is_refused_and_left_as_it_is(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"holds something else: line \d is no line of a batch's output"):
        keys_in(path)
    assert path.read_bytes() == data


def test_a_second_run_is_refused_until_the_first_has_ended(path: Path) -> None:
    with opened(path) as file:
        file.append(LINES[0])
        with pytest.raises(UserError, match="another run is writing OUTPUT"):
            OutputFile(path)
        file.drop_errors()  # it is another file now, and still locked
        with pytest.raises(UserError, match="another run is writing OUTPUT"):
            OutputFile(path)
    assert keys_in(path) == IDS[:1]


def test_a_file_that_took_the_place_of_the_locked_one_is_locked_instead(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(LINES[0])
    lock = OutputFile._lock

    def replaced_before(self: OutputFile, descriptor: int) -> None:
        monkeypatch.undo()
        other = path.with_name("other")
        other.write_bytes(LINES[2])
        other.replace(path)
        lock(self, descriptor)

    monkeypatch.setattr(OutputFile, "_lock", replaced_before)
    assert keys_in(path) == IDS[2:]


def test_a_file_system_without_locks_is_told_of(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(output_file.fcntl, "flock", refuse)
    with opened(path) as file:
        file.append(LINES[0])
    assert "cannot be locked (No locks available): start no second run" in caplog.text


def test_errors_are_taken_out_and_the_rest_stays_with_its_mode_and_its_link(path: Path) -> None:
    path.write_bytes(b"".join(LINES) + line("d"))
    path.chmod(0o640)
    path.with_name(REST_NAME.format(path.name)).write_text("left by a run that was killed")
    link = path.with_name("link")
    link.symlink_to(path)
    with opened(link) as file:
        assert len(list(file.records())) == 4
        file.drop_errors()
        file.append(line("e"))
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert keys_in(path) == [key(None, custom_id, None) for custom_id in "acde"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["link", "out.jsonl"]


def test_errors_that_cannot_be_taken_out_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path.write_bytes(b"".join(LINES))
    with opened(path) as file:
        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(UserError, match=r"cannot write OUTPUT .*: Input/output error; what OUTPUT holds stays"):
            file.drop_errors()
        file.append(line("d"))
    assert keys_in(path) == [*IDS, key(None, "d", None)]
    assert [file.name for file in path.parent.iterdir()] == ["out.jsonl"]


def test_a_full_disk_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", full)
        return write(descriptor, bytes(data)[: len(data) // 2])

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(path) as file:
        file.append(LINES[0])
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(UserError, match="No space left on device; what OUTPUT holds stays"):
            file.append(LINES[1])
        monkeypatch.undo()
    assert path.read_bytes() == LINES[0]


def test_a_line_that_is_taken_in_parts_is_whole_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with opened(path) as file:
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:7]))
        file.append(LINES[0])
        monkeypatch.undo()
    assert path.read_bytes() == LINES[0]


def test_it_is_due_for_the_disk_some_seconds_after_the_last_time(path: Path) -> None:
    now_s = 100.0
    file = OutputFile(path, clock=lambda: now_s)
    try:
        now_s += SYNC_S
        assert not file.is_due  # nothing is new
        file.append(LINES[0])
        assert file.is_due
        file.sync()
        file.append(LINES[1])
        assert not file.is_due
        now_s += SYNC_S
        assert file.is_due
    finally:
        file.close()


def test_a_file_that_got_no_line_is_gone_if_it_was_not_there_before(path: Path) -> None:
    with opened(path):
        assert path.exists()
    assert not path.exists()
    path.touch()
    with opened(path):
        pass
    assert path.exists()


def test_a_file_without_place_for_another_one_beside_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)  # the other one's name would be too long
    path.write_bytes(b"".join(LINES))
    with opened(path) as file:
        with pytest.raises(UserError, match=r"cannot write .*, which takes its place without errors: File name too"):
            file.drop_errors()
        file.append(line("d"))
    assert keys_in(path) == [*IDS, key(None, "d", None)]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_taken_away_while_it_is_written_is_noticed(path: Path, is_replaced: bool) -> None:
    file = OutputFile(path)
    try:
        path.unlink()
        if is_replaced:
            path.touch()
        with pytest.raises(UserError, match="was removed or replaced while it was written"):
            file.sync()
    finally:
        file.close()
    assert path.exists() == is_replaced  # another one's file is not taken away


def test_what_cannot_be_written_is_told(path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write OUTPUT .*: File name too long"):
        OutputFile(path.with_name("x" * 300))
    reader, writer = os.pipe()
    try:
        with pytest.raises(UserError, match="is no regular file; give a file"):
            OutputFile(Path(f"/dev/fd/{writer}"))
    finally:
        os.close(reader)
        os.close(writer)
    with pytest.raises(UserError, match=r"the folder of OUTPUT .* does not exist; make it"):
        OutputFile(path / "more" / "out.jsonl")
    with pytest.raises(UserError, match="is no regular file; give a file"):
        OutputFile(path.parent)
    with pytest.raises(UserError, match="is no regular file; give a file"):
        OutputFile(Path("/dev/null"))
