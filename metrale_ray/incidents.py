# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where an engine's journal goes, and what a rank keeps of its last commands when it ends badly.

Rules: incidents lie beside the journal, or, where there is none, in the user's cache folder and then without clients'
content: nobody has asked for prompts on the disk. What cannot be written is logged and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from metrale_ray.config import EngineConfig, cache_folder
from metrale_ray.protocol.journal.dump import write_dump
from metrale_ray.protocol.journal.journal import Journal, NoJournal
from metrale_ray.protocol.journal.records import Record
from metrale_ray.protocol.journal.writer import JournalWriter

log = logging.getLogger(__name__)

FOLDER = "incidents"


def open_journal_of(config: EngineConfig) -> Journal:
    """The journal that `config` asks for, or none. Raises ConfigError where it cannot be written."""
    if config.journal is None:
        return NoJournal()
    return JournalWriter(
        config.journal,
        max_bytes=config.journal_max_size,
        max_age_s=config.journal_max_age_s,
        redact=config.journal_redact,
    )


def incident_folder(config: EngineConfig, rank: int) -> Path:
    """Where the last commands of a rank are kept, on its node."""
    return (Path(config.journal) if config.journal is not None else cache_folder()) / FOLDER / f"rank-{rank}"


def keep_incident(config: EngineConfig, rank: int, records: Sequence[Record]) -> Path | None:
    """Write the last commands of a rank to a file of its own, and log where. None where it cannot be written."""
    folder = incident_folder(config, rank)
    try:
        path = write_dump(folder, f"rank-{rank}", records, redact=config.journal_redact or config.journal is None)
    except OSError as error:
        log.warning("rank %d: its last commands could not be kept in %s: %s", rank, folder, error.strerror or error)
        return None
    log.error("rank %d: its last commands are in %s; read them with metrale-ray inspect-journal", rank, path)
    return path
