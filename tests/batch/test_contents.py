# SPDX-License-Identifier: MIT OR Apache-2.0
"""What INPUT asks and OUTPUT answers together: counts, what is still open, and an OUTPUT of another INPUT."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from metrale_ray.batch.contents import Contents, read_contents
from metrale_ray.batch.input_file import BUFFER_BYTES, InputFile
from metrale_ray.batch.line import BadLine, BatchRequest, Line, duplicate, read_line
from metrale_ray.batch.output_file import OutputFile
from metrale_ray.batch.record import answer_line, error_line
from metrale_ray.errors import UserError
from metrale_ray.serve.limits import ServeLimits
from tests.batch.rig import by_id, completion, write_lines

LIMITS = ServeLimits()


@contextmanager
def read(folder: Path, lines: Sequence[object], answers: Sequence[bytes], **options: bool) -> Iterator[Contents]:
    write_lines(folder / "in", [json.dumps(line) if not isinstance(line, str) else line for line in lines])
    (folder / "out").write_bytes(b"".join(answers))
    source, output = InputFile(folder / "in", LIMITS), OutputFile(folder / "out")
    try:
        yield read_contents(source, output, retry_errors=options.get("retry_errors", False))
    finally:
        source.close()
        output.close()


def answer(custom_id: str, status: int = 200) -> bytes:
    return answer_line(custom_id, status, "r", b"{}")


def shown(contents: Contents) -> list[tuple[int, str]]:
    """The open lines: their numbers, and their ids or what is wrong."""
    found = [line for line in contents.open_lines() if line is not None]
    return [(line.number, line.code if isinstance(line, BadLine) else line.custom_id) for line in found]


LINES = [completion("a"), "{", completion("b"), completion("a"), completion("c") | {"url": "/x"}]
ALL_OPEN = [(1, "a"), (2, "invalid_json_line"), (3, "b"), (4, "duplicate_custom_id"), (5, "invalid_url")]


def errors() -> dict[int, bytes]:
    """What OUTPUT says of the lines that are no requests."""
    read_lines = {n: read_line(n, json.dumps(LINES[n - 1]).encode(), LIMITS) for n in (4, 5)}
    bad: list[Line] = [read_line(2, b"{", LIMITS), duplicate(read_lines[4]), read_lines[5]]
    return {line.number: error_line(line) for line in bad if isinstance(line, BadLine)}


def test_every_line_is_open_at_first(tmp_path: Path) -> None:
    with read(tmp_path, LINES, []) as contents:
        assert (contents.num_lines, contents.num_to_ask, contents.num_answered) == (5, 2, 0)
        assert shown(contents) == ALL_OPEN
        notes = contents.notes()
        assert [note.partition(":")[0] for note in notes] == [f"line {n} of INPUT is no request" for n in (2, 4, 5)]


def test_of_many_lines_that_are_no_requests_some_are_told_and_the_others_counted(tmp_path: Path) -> None:
    with read(tmp_path, ["{"] * 10, []) as contents:
        assert len(contents.notes()) == 4
        assert contents.notes()[-1] == "7 more lines of INPUT are no requests"


def test_what_output_answers_is_not_open_any_more(tmp_path: Path) -> None:
    said = {1: answer("a"), 3: answer("b"), **errors()}
    for answered in (set(chosen) for count in range(6) for chosen in itertools.combinations(range(1, 6), count)):
        with read(tmp_path, LINES, [said[number] for number in sorted(answered, reverse=True)]) as contents:
            assert contents.num_answered == len(answered)
            assert contents.num_errors == len(answered & {2, 4, 5})
            assert contents.num_to_ask == 2 - len(answered & {1, 3})
            assert shown(contents) == [item for item in ALL_OPEN if item[0] not in answered]


def test_errors_are_open_again_when_they_are_to_be_asked_again(tmp_path: Path) -> None:
    said = [answer("a"), answer("b", 429), *errors().values()]
    with read(tmp_path, LINES, said, retry_errors=True) as contents:
        assert shown(contents) == ALL_OPEN[1:]
        assert (contents.num_answered, contents.num_errors, contents.num_to_ask) == (1, 0, 1)
        assert by_id(tmp_path / "out").keys() == {"a"}
    with read(tmp_path, LINES, said) as contents:
        assert shown(contents) == []
        assert (contents.num_answered, contents.num_errors) == (5, 4)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([answer("a"), answer("z")], "it answers 'z', which INPUT does not have"),
        ([answer("a"), answer("a")], "it answers 'a' for the second time"),
        ([error_line(BadLine(1, None, "x", ""))], "it answers line 1, which INPUT does not have"),
        ([error_line(BadLine(9, None, "x", ""))], "it answers line 9, which INPUT does not have"),
    ],
)
def test_an_output_of_another_input_is_refused(tmp_path: Path, answers: list[bytes], message: str) -> None:
    with pytest.raises(UserError) as caught, read(tmp_path, LINES, answers):
        pass
    assert message in caught.value.message
    assert "or another OUTPUT" in caught.value.message
    assert (tmp_path / "out").read_bytes() == b"".join(answers)


def test_who_has_corrected_a_wrong_line_is_told_how_to_go_on(tmp_path: Path) -> None:
    corrected = [completion("a"), completion("b"), completion("c")]
    was_wrong = [read_line(2, b"{", LIMITS), duplicate(read_line(3, json.dumps(completion("a")).encode(), LIMITS))]
    for line, hint in [(line, f"answers line {line.number}, which INPUT does not have") for line in was_wrong]:
        assert isinstance(line, BadLine)
        with pytest.raises(UserError) as caught, read(tmp_path, corrected, [error_line(line)]):
            pass
        assert hint in caught.value.message
        assert "or --retry-errors, if a line that was wrong is right now" in caught.value.message
        with read(tmp_path, corrected, [error_line(line)], retry_errors=True) as contents:
            assert len(shown(contents)) == 3


def test_an_input_without_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is empty; write one request in each line"), read(tmp_path, ["", " "], []):
        pass


def test_lines_that_changed_unseen_are_refused_when_they_are_read_again(tmp_path: Path) -> None:
    with read(tmp_path, [completion("a")], []) as contents:
        state = (tmp_path / "in").stat()
        (tmp_path / "in").write_text(json.dumps(completion("b")) + "\n")
        os.utime(tmp_path / "in", ns=(state.st_atime_ns, state.st_mtime_ns))
        with pytest.raises(UserError, match="was changed meanwhile"):
            shown(contents)


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_an_input_that_has_lost_or_got_lines_while_it_was_read_is_refused(tmp_path: Path, kept: int) -> None:
    lines = [completion(f"id-{n}", user="x" * BUFFER_BYTES) for n in range(3)]  # each longer than what is read ahead
    more = completion("id-3")
    with read(tmp_path, lines, []) as contents:
        found = contents.open_lines()
        next(found)
        write_lines(tmp_path / "in", [*lines, more][:kept])
        with pytest.raises(UserError, match="was changed meanwhile"):
            list(found)


def test_lines_that_are_answered_are_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with read(tmp_path, LINES, [answer("a"), *errors().values()]) as contents:
        numbers = list[int]()
        parse = InputFile.read
        monkeypatch.setattr(
            InputFile, "read", lambda self, number, data: numbers.append(number) or parse(self, number, data)
        )
        assert shown(contents) == [(3, "b")]
        assert numbers == [3]


def test_requests_come_as_they_stand(tmp_path: Path) -> None:
    with read(tmp_path, [completion("a", first=9)], []) as contents:
        (line,) = contents.open_lines()
        assert line == BatchRequest(1, "a", "/v1/completions", completion("a", first=9)["body"])
