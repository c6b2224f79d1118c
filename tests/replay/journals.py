# SPDX-License-Identifier: MIT OR Apache-2.0
"""Journals of whole engines in this process, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from metrale_ray.protocol.journal.journal import MemoryJournal
from metrale_ray.protocol.journal.records import Closed, Record, Started
from metrale_ray.protocol.journal.writer import JournalWriter
from metrale_ray.replay.replaying import ReplayResult, replay_journal, started_of
from metrale_ray.replay.settings import replay_config
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import RequestId
from tests.harness import GREEDY, Driver, Outcome, Script, run_engine

# Prompts over a small budget: chunks, mixed steps, batches, and single decodes at the end. The cache is too small for
# all at once, so some are preempted.
SETTINGS: dict[str, Any] = {
    "max_batch_size": 6,
    "max_num_batched_tokens": 12,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_memory": 45_056,
    "agreement_interval": 3,
}
DRAWN = TokenParams(
    temperature=0.9,
    top_p=0.95,
    max_tokens=10,
    n=3,
    seed=5,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    logprobs=2,
    prompt_logprobs=1,
    ignore_eos=True,
    bad_token_ids=((7, 8), (9,)),
)
RecordKind = TypeVar("RecordKind")


@dataclass
class Recorded:
    """A journal and what the clients got."""

    records: list[Record]
    outcome: Outcome

    @property
    def started(self) -> Started:
        """The first record."""
        return of_kind(self.records, Started)[0]


def record(model: Path, script: Script, *, ep_size: int = 1, **settings: Any) -> Recorded:
    """Run `script` with a journal in memory."""
    journal = MemoryJournal()
    outcome = run_engine(model, script, ep_size=ep_size, journal=journal, **{**SETTINGS, **settings})
    journal.close("the script has ended", None)
    return Recorded(journal.records, outcome)


def busy_script(driver: Driver) -> None:
    """Requests of many kinds, one of which is aborted."""
    aborted = driver.submit([11, *range(20, 40)], TokenParams(temperature=0, max_tokens=30, ignore_eos=True))
    driver.submit(list(range(40, 57)), DRAWN)
    for _ in range(5):
        driver.engine.step()
    driver.submit([7] * 13, TokenParams(temperature=1.0, max_tokens=20, ignore_eos=True, min_tokens=2))
    driver.submit([3, 4, 5], GREEDY)
    for _ in range(8):
        driver.engine.step()
    driver.engine.abort(RequestId(aborted))
    driver.run()
    driver.engine.ping()
    driver.submit([2, 3, 5], GREEDY)
    driver.run()


def replay(records: Sequence[Record], **settings: Any) -> ReplayResult:
    """Run `records` again; `settings` are those of `replay_config`."""
    started = started_of(records)
    return replay_journal(records, replay_config(started, **settings))


def of_kind(records: Sequence[Record], kind: type[RecordKind]) -> list[RecordKind]:
    """The records of one class, in order."""
    return [record for record in records if isinstance(record, kind)]


def write(folder: Path, records: Sequence[Record], *, redact: bool = False) -> Path:
    """A journal of `records` on disk: the folder that holds its one life."""
    writer = JournalWriter(folder, max_bytes=2**30, max_age_s=1e6, redact=redact)
    for each in records:
        if not isinstance(each, Closed):
            writer.note(each)
    writer.close("the script has ended", None)
    return folder
