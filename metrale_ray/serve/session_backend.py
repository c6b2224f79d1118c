# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SessionBackend`: an engine whose session is open already and never comes back, as a `Backend`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient
from metrale_ray.serve.backend import Health
from metrale_ray.serve.front import Front


class SessionBackend:
    """`front` is over `client`. `explain` gives a death as callers are told it."""

    def __init__(
        self, client: FrontClient, front: Front, explain: Callable[[EngineDead], Awaitable[EngineDead]]
    ) -> None:
        self._client = client
        self._front = front
        self._explain = explain

    def front(self) -> Front:
        """The way to ask it something. One that has ended says so to whoever asks it."""
        return self._front

    def health(self) -> Health:
        """Ready until the session ends."""
        death = self._client.death
        return Health(True, "", True, "") if death is None else Health(False, death.message, True, "")

    def figures(self) -> Mapping[str, Any]:
        """Nobody asks the head."""
        return {}

    async def explain(self, seen: EngineDead) -> EngineDead:
        """The death as a caller is told it."""
        return await self._explain(seen)
