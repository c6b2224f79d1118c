# SPDX-License-Identifier: MIT OR Apache-2.0
"""INPUT, read line by line: what counts as a line, what is passed over, and what cannot be read."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.batch.input_file import InputFile
from metrale_ray.batch.line import AROUND_BODY_BYTES, BadLine, Line
from metrale_ray.errors import UserError
from metrale_ray.serve.limits import ServeLimits
from tests.batch.rig import completion

LIMITS = ServeLimits(max_body_bytes=1000)
MOST_BYTES = 1000 + AROUND_BODY_BYTES


@contextmanager
def opened(path: Path) -> Iterator[InputFile]:
    file = InputFile(path, LIMITS)
    try:
        yield file
    finally:
        file.close()


def lines_of(path: Path) -> list[Line]:
    with opened(path) as file:
        found = list(file.lines())
        assert list(file.lines()) == found  # as often as is needed
        return [file.read(number, data) for number, data in found]


def line(custom_id: str, num_bytes: int | None = None) -> bytes:
    """A request; with `num_bytes`, of this length."""
    value: dict[str, Any] = completion(custom_id)
    data = json.dumps(value).encode()
    return data if num_bytes is None else data + b" " * (num_bytes - len(data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (line("a") + b"\n" + line("b") + b"\n", [(1, "a"), (2, "b")]),
        (line("a") + b"\n" + line("b"), [(1, "a"), (2, "b")]),
        (b"\xef\xbb\xbf" + line("a") + b"\r\n" + line("b") + b"\r\n", [(1, "a"), (2, "b")]),
        (b"\n\n" + line("a") + b"\n  \t\n" + line("b") + b"\n\n", [(3, "a"), (5, "b")]),
        (b"", []),
        (b"\n \n", []),
        ("\u2028".join(['{"custom_id": "a', 'b"}\n']).encode(), [(1, "a\u2028b")]),
    ],
)
def test_lines_are_counted_as_editors_do_and_empty_ones_skipped(
    tmp_path: Path, data: bytes, expected: list[tuple[int, str]]
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(data)
    assert [(found.number, found.custom_id) for found in lines_of(file)] == expected


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize(("num_bytes", "is_read"), [(MOST_BYTES, True), (MOST_BYTES + 1, False), (3 * 2**20, False)])
def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, num_bytes: int, is_read: bool, end: bytes) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(line("a") + b"\n" + line("b", num_bytes) + b"\n" + line("c", num_bytes) + end)
    first, *others = lines_of(file)
    assert first.custom_id == "a"
    assert [found.number for found in others] == [2, 3]
    if is_read:
        assert [found.custom_id for found in others] == ["b", "c"]
    else:
        assert [found.code for found in others if isinstance(found, BadLine)] == ["line_too_long"] * 2
        assert f"at most {MOST_BYTES} bytes" in others[0].message if isinstance(others[0], BadLine) else False


def test_a_large_file_takes_no_more_memory_than_a_line(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    with file.open("wb") as lines:
        lines.truncate(64 * 2**20)  # one line of zeros, and no newline at all
    tracemalloc.start()
    try:
        (found,) = lines_of(file)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, BadLine)
    assert peak_bytes < 10 * 2**20


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read INPUT .*nowhere: No such file"):
        InputFile(tmp_path / "nowhere", LIMITS)
    with pytest.raises(UserError, match="is a folder"):
        InputFile(tmp_path, LIMITS)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is no regular file; it is read more than once"):
        InputFile(tmp_path / "pipe", LIMITS)


def test_a_file_that_is_written_to_between_two_readings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(line("a"))
    with opened(file) as given:
        assert len(list(given.lines())) == 1
        with file.open("ab") as more:
            more.write(b"\n" + line("b"))
        with pytest.raises(UserError, match="was changed meanwhile"):
            list(given.lines())


def test_another_file_of_its_name_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(line("a"))
    with opened(file) as given:
        file.unlink()
        file.write_bytes(line("b"))
        assert list(given.lines()) == [(1, line("a"))]
