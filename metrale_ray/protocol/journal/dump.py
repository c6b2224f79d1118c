# SPDX-License-Identifier: MIT OR Apache-2.0
"""A dump: a few records in a file of its own, to be read as a journal is, for whoever asks what came before a failure.

Rules: written whole or not at all, for this user only; the newest MAX_DUMPS of a folder are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from metrale_ray.errors import FrameError
from metrale_ray.protocol.journal.journal import at_us_of
from metrale_ray.protocol.journal.lives import FILE_MODE, FOLDER_MODE, dumps_of, stamp
from metrale_ray.protocol.journal.record_codec import encode_record
from metrale_ray.protocol.journal.records import Gap, Record
from metrale_ray.protocol.journal.redaction import Redaction
from metrale_ray.protocol.journal.segments import DUMP_SUFFIX, MAGIC, pack_record

MAX_DUMPS = 20
"""Dumps that a folder keeps: an engine that fails again and again does not fill the disk."""


def write_dump(
    folder: str | Path,
    name: str,
    records: Iterable[Record],
    *,
    redact: bool,
    wall_clock: Callable[[], float] = time.time,
) -> Path:
    """Write `records` to a new file in `folder` (made where it is missing) whose name ends in `name`. Its path.

    A record that cannot be packed becomes a Gap. Raises OSError.
    """
    folder = Path(folder)
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    unfinished = folder / f".{stamp(wall_clock())}-{os.getpid()}-{name}"
    try:
        _write(unfinished, MAGIC + b"".join(_packed(records, Redaction() if redact else None)))
        path = _free_name(folder, f"{stamp(wall_clock())}-{name}")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    _keep_newest(folder)
    return path


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb") as file:
        file.write(data)


def _packed(records: Iterable[Record], redaction: Redaction | None) -> Iterator[bytes]:
    for record in records:
        try:
            payload = encode_record(record if redaction is None else redaction.redact(record))
        except FrameError:
            payload = encode_record(Gap(at_us_of(record), 1))
        yield pack_record(payload)


def _free_name(folder: Path, name: str) -> Path:
    """A name that no dump has: a second may see several, which sort in the order in which they came."""
    numbers = range(1, MAX_DUMPS + 2)
    paths = [folder / f"{name}{'' if number == 1 else f'-{number}'}{DUMP_SUFFIX}" for number in numbers]
    return next((path for path in paths if not path.exists()), paths[-1])


def _keep_newest(folder: Path) -> None:
    dumps = sorted(dumps_of(folder), key=lambda path: (_written_ns(path), path.name))
    for path in dumps[:-MAX_DUMPS]:
        path.unlink(missing_ok=True)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another engine of this folder was faster
        return 0
