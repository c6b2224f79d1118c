# SPDX-License-Identifier: MIT OR Apache-2.0
"""The journal of a simulated life, run again: the same tokens, digests and witnesses; on other ranks the same tokens.

It takes about as long as the life itself, so it is done for some seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from metrale_ray.protocol.journal.records import Record, Started
from metrale_ray.replay.replaying import replay_journal
from metrale_ray.replay.settings import replay_config


def differences(records: Sequence[Record], ep_size: int | None = None) -> Iterator[str]:
    """What is not as it was recorded, one line; with `ep_size` on so many ranks. None of a life that never began."""
    started = next((record for record in records if isinstance(record, Started)), None)
    if started is None:
        return
    result = replay_journal(records, replay_config(started, ep_size=ep_size))
    if result.difference is not None:
        yield f"its journal, run again on {ep_size or 'as many'} ranks, differs: {result.difference}"
