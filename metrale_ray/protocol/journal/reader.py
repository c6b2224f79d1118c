# SPDX-License-Identifier: MIT OR Apache-2.0
"""`open_journal`: the records of a journal, in order, over all of its segments.

Rules: a life's journal may have lost its oldest segments (it then begins with a Snapshot), and may be torn at its end,
after a crash or while it is being written. Neither is an error; `torn` and the first record tell. Segments that are
missing in between give a Gap of 0 records. Damage is a JournalError with the file and the byte.

What is left out: what is made of the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from metrale_ray.errors import FrameError, JournalError
from metrale_ray.protocol.journal.lives import segments_of, stamp
from metrale_ray.protocol.journal.record_codec import decode_record
from metrale_ray.protocol.journal.records import Commanded, Gap, ReadRecord, Snapshot, Started, Unknown
from metrale_ray.protocol.journal.segments import SegmentReader, segment_number

MAX_LISTED = 20
"""Lives that an error lists, the newest ones."""


class JournalReader:
    """The records of `segments`; each iteration reads the files anew.

    `missing`: the numbers of segments that are missing in between, run by run. `torn`: whether the last segment ends
    inside a record; known once an iteration has come to the end. `num_bytes_read`: where the newest iteration is.
    """

    def __init__(self, path: Path, segments: Sequence[Path]) -> None:
        self.path = path
        self.segments = tuple(segments)
        self.missing = _missing(self.segments)
        self.torn = False
        self.num_bytes_read = 0

    @property
    def num_bytes(self) -> int:
        """What the segments take now."""
        return sum(path.stat().st_size for path in self.segments if path.exists())

    def __iter__(self) -> Iterator[ReadRecord]:
        at_us = num_bytes_before = 0
        for index, path in enumerate(self.segments):
            if index and _missing((self.segments[index - 1], path)):
                yield Gap(at_us, 0)
            segment = SegmentReader(path)
            for record in _records(segment):
                if not isinstance(record, Started | Unknown):
                    at_us = record.at_us
                self.num_bytes_read = num_bytes_before + segment.offset
                yield record
            num_bytes_before += segment.offset
            self._check_end(segment)

    @property
    def first_seq(self) -> int | None:
        """The number of the first command that can be run again from here; None where there is none.

        Reads as far as that command. Raises JournalError for damage before it.
        """
        for record in self:
            match record:
                case Commanded():
                    return record.seq
                case Snapshot():
                    return record.seq + 1
                case _:
                    continue
        return None

    def _check_end(self, segment: SegmentReader) -> None:
        if segment.path == self.segments[-1]:
            self.torn = segment.torn
        elif segment.torn:
            raise segment.damage("the file ends inside a record, though another segment follows")


def open_journal(path: str | Path) -> JournalReader:
    """The journal at `path`: a segment or a dump, the folder of one life, or a folder that holds one life.

    Raises JournalError where there is none, or where there are several.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            return _file_journal(path)
        segments = segments_of(path)
        return JournalReader(path, [file for _, file in segments]) if segments else _only_life(path)
    except OSError as error:
        raise JournalError(f"cannot read the journal at {path}: {error.strerror}") from error


def _file_journal(path: Path) -> JournalReader:
    if not path.exists():
        raise JournalError(f"there is no journal at {path}; give a segment, a dump, or the folder they are in")
    return JournalReader(path, [path])


def _only_life(folder: Path) -> JournalReader:
    found = [(life, segments_of(life)) for life in sorted(folder.iterdir()) if life.is_dir()]
    lives = [(life, [file for _, file in segments]) for life, segments in found if segments]
    if not lives:
        raise JournalError(f"{folder} holds no journal: neither segments such as 000001.journal, nor a folder of them")
    if len(lives) > 1:
        listed = [_described(*life) for life in lives[-MAX_LISTED:]]
        more = [f"  ... and {len(lives) - MAX_LISTED} older ones"] if len(lives) > MAX_LISTED else []
        raise JournalError("\n".join([f"{folder} holds {len(lives)} journals; give one of them:", *more, *listed]))
    return JournalReader(*lives[0])


def _described(life: Path, segments: Sequence[Path]) -> str:
    """One line: where it is, how large, and when it was written last."""
    found = [file.stat() for file in segments]
    size, written_s = sum(each.st_size for each in found), max(each.st_mtime for each in found)
    return f"  {life}  {size / 2**20:.1f} MiB, written last at {stamp(written_s)}"


def _records(segment: SegmentReader) -> Iterator[ReadRecord]:
    for payload in segment:
        try:
            yield decode_record(payload)
        except FrameError as error:
            raise segment.damage(error.message) from error


def _missing(segments: Sequence[Path]) -> tuple[range, ...]:
    numbers = [number for path in segments if (number := segment_number(path.name)) is not None]
    return tuple(range(here + 1, after) for here, after in pairwise(numbers) if after > here + 1)
