# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Meeting`: what the ranks say to each other through the head's store while they form a group.

Rules. Each rank says one thing on a topic; whoever hears a topic waits until all that it names have spoken. All of it
has one deadline, and meanwhile the peers are looked at: a rank that does not come is named in LinkLost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from metrale_ray.errors import LinkLost
from metrale_ray.model.torch_distributed import first_line

# Between two looks for what others say, doubled each time. The store's own wait is of no use here: a limit that passes
# is logged as a fault of the network.
FIRST_PAUSE_S = 0.001
LAST_PAUSE_S = 0.05


class Meeting:
    """One rank of the group. `store` is the head's, `host` this node's address; its time begins with it."""

    def __init__(
        self, rank: int, world: int, store: Any, host: str, timeout_s: float, check_peers: Callable[[], None]
    ) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self.check_peers = check_peers
        self._store = store
        self._host = host
        self._deadline = time.monotonic() + timeout_s

    def for_torch(self) -> dict[str, Any]:
        """What a group of torch's is joined with."""
        shared = {"timeout_s": self.timeout_s, "check_peers": self.check_peers}
        return {"store": self._store, "host": self._host, **shared}

    def say(self, topic: str, what: object) -> None:
        """Tell all ranks. Raises LinkLost."""
        try:
            self._store.set(_key(topic, self.rank), json.dumps(what))
        except RuntimeError as error:
            raise self._lost(first_line(error)) from error

    def hear(self, topic: str, ranks: Iterable[int]) -> list[Any]:
        """What these ranks say, once all of them have. Raises LinkLost."""
        ranks = list(ranks)
        keys = [_key(topic, rank) for rank in ranks]
        try:
            pause_s = FIRST_PAUSE_S
            while not self._store.check(keys):
                self.check_peers()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                if time.monotonic() >= self._deadline:
                    missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
                    raise self._lost(f"nothing came from rank {', '.join(map(str, missing))}", *missing[:1])
            return [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise self._lost(first_line(error)) from error

    def _lost(self, why: str, rank: int | None = None) -> LinkLost:
        return LinkLost(
            f"rank {self.rank} at {self._host} could not join the other ranks within {self.timeout_s:g} s: {why}",
            rank=rank,
        )


def _key(topic: str, rank: int) -> str:
    return f"metrale_ray/{topic}/{rank}"
