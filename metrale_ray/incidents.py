# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where an engine's journal goes, and what a rank keeps of its last commands when it ends badly.

Rules: incidents lie beside the journal, or, where there is none or it cannot be written on this node, in the user's
cache folder and then without clients' content: nobody has asked for prompts there. Folders made here are this user's
alone. What cannot be written at all is logged and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from metrale_ray.config import EngineConfig, cache_folder
from metrale_ray.protocol.journal.dump import write_dump
from metrale_ray.protocol.journal.journal import Journal, NoJournal
from metrale_ray.protocol.journal.lives import FOLDER_MODE, INCIDENTS
from metrale_ray.protocol.journal.records import Record
from metrale_ray.protocol.journal.writer import JournalWriter

log = logging.getLogger(__name__)


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


def incident_folders(config: EngineConfig, rank: int) -> Iterator[tuple[Path, bool]]:
    """Where the last commands of a rank may be kept on its node, the best place first, and whether redacted there."""
    own = Path(INCIDENTS) / f"rank-{rank}"
    if config.journal is not None:
        yield config.journal / own, config.journal_redact
    try:
        yield cache_folder() / own, True
    except RuntimeError as error:  # pathlib's, for a user without a home
        log.warning("rank %d has no cache folder: %s; set METRALE_CACHE_DIR", rank, error)


def keep_incident(config: EngineConfig, rank: int, records: Sequence[Record]) -> Path | None:
    """Write the last commands of a rank to a file of its own, and log where. None where it cannot be written."""
    for folder, is_redacted in incident_folders(config, rank):
        try:
            folder.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            path = write_dump(folder, f"rank-{rank}", records, redact=is_redacted)
        except OSError as error:
            log.warning("rank %d: its last commands could not be kept in %s: %s", rank, folder, error.strerror or error)
            continue
        log.error("rank %d: its last commands are in %s; read them with metrale-ray inspect-journal", rank, path)
        return path
    return None
