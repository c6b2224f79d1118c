# SPDX-License-Identifier: MIT OR Apache-2.0
"""Segments: files of records, each with its length and checksums.

    segment = MAGIC record*
    record  = u32 length, u32 crc32 of the payload, u32 crc32 of these eight bytes, payload        (little-endian)

Rules: a file that ends inside its last record (or whose last record has a wrong checksum, or that goes on with zeros
alone, as after a loss of power) ends before it: it is torn. The checksum of the head tells that from a damaged length.
Anything else that is wrong is damage: JournalError with the file and the byte. A payload is never empty, and never
larger than MAX_RECORD_BYTES, so that a damaged file cannot take all memory.

What is left out: what a payload means (`record_codec`), which files belong together (`reader`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import BinaryIO
from zlib import crc32

from metrale_ray.errors import JournalError
from metrale_ray.protocol.journal.record_codec import MAX_RECORD_BYTES

MAGIC = b"MRJRNL\x01\n"
"""A segment begins with it; the seventh byte is the format of these files."""

FORMAT_BYTE = 6
SEGMENT_SUFFIX = ".journal"
DUMP_SUFFIX = ".dump"
"""A file of a few records by itself, in the same format."""

SEGMENT_NAME = re.compile(r"(\d{6,12})\.journal")
DUMP_NAME = re.compile(r"\d{8}T\d{6}Z-.+\.dump")
"""Others may have files that end so, and those must never be removed."""

HEAD_BYTES = 12
READ_BYTES = 2**18
"""How much is looked at in one go where a file may end in zeros."""

_LENGTHS = Struct("<II")
_CHECK = Struct("<I")


def segment_name(number: int) -> str:
    """The file name of a life's segment with that number, from 1."""
    return f"{number:06d}{SEGMENT_SUFFIX}"


def segment_number(name: str) -> int | None:
    """The number of a segment with that file name, None where it is none."""
    match = SEGMENT_NAME.fullmatch(name)
    return int(match[1]) if match else None


def pack_record(payload: bytes) -> bytes:
    """`payload` as it stands in a segment."""
    lengths = _LENGTHS.pack(len(payload), crc32(payload))
    return b"".join((lengths, _CHECK.pack(crc32(lengths)), payload))


class SegmentReader:
    """The payloads of one segment, in order: iterate once, then `torn` says whether the file ends inside a record.

    `offset` is where the record that was read last begins, and at the end where the file stops being whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.torn = False

    def __iter__(self) -> Iterator[bytes]:
        with _opened(self.path) as file:
            try:
                yield from self._payloads(file)
            except OSError as error:
                raise JournalError(f"cannot read {self.path}: {error.strerror}") from error

    def damage(self, what: str) -> JournalError:
        """An error about the record that was read last."""
        return JournalError(f"{self.path} is damaged at byte {self.offset}: {what}")

    def _payloads(self, file: BinaryIO) -> Iterator[bytes]:
        if not self._has_magic(file.read(len(MAGIC))):
            return
        self.offset = len(MAGIC)
        while payload := self._payload(file):
            yield payload
            self.offset = file.tell()

    def _has_magic(self, found: bytes) -> bool:
        if found == MAGIC:
            return True
        if MAGIC.startswith(found) or not found.strip(b"\0"):
            self.torn = True  # the process ended before it had written so much
            return False
        if len(found) == len(MAGIC) and found[:FORMAT_BYTE] == MAGIC[:FORMAT_BYTE]:
            raise JournalError(
                f"{self.path} is a journal of format {found[FORMAT_BYTE]}, and this build reads format "
                f"{MAGIC[FORMAT_BYTE]}; read it with the build that wrote it"
            )
        raise JournalError(f"{self.path} is no segment of a journal: it does not begin as one")

    def _payload(self, file: BinaryIO) -> bytes | None:
        """The next payload, or None at the end. Raises JournalError for damage."""
        head = file.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES:
            self.torn = len(head) > 0
            return None
        length, checksum = _LENGTHS.unpack_from(head)
        if crc32(head[: _LENGTHS.size]) != _CHECK.unpack_from(head, _LENGTHS.size)[0]:
            if not head.strip(b"\0") and _is_zeros(file):
                self.torn = True
                return None
            raise self.damage("the head of a record has a wrong checksum")
        if not 0 < length <= MAX_RECORD_BYTES:
            raise self.damage(f"a record of {length} bytes; it has 1 to {MAX_RECORD_BYTES}")
        payload = file.read(length)
        if len(payload) == length and crc32(payload) == checksum:
            return payload
        if len(payload) == length and not _is_zeros(file):
            raise self.damage("a record has a wrong checksum")
        self.torn = True
        return None


def _opened(path: Path) -> BinaryIO:
    """The file at `path`. Raises JournalError for one that is missing or none, without waiting for a pipe's writer."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError as error:
        raise JournalError(
            f"{path} does not exist; where an engine is writing, its oldest segments are removed as new ones begin"
        ) from error
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise JournalError(f"{path} is not a file")
    return file


def _is_zeros(file: BinaryIO) -> bool:
    """Whether nothing follows, or nothing but zeros."""
    return all(not chunk.strip(b"\0") for chunk in iter(lambda: file.read(READ_BYTES), b""))
