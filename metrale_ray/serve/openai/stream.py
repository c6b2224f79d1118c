# SPDX-License-Identifier: MIT OR Apache-2.0
"""`streamed`: one call's answer as the bytes of server-sent events.

Rules. All that is new at once is one bytes object. Nothing is given before the engine's first output, so a refusal is
an error and no stream. A later failure is raised too: whoever sends the events tells it as the last of them, and knows
of it for the log and the figures.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from metrale_ray.serve.openai.events import DONE
from metrale_ray.serve.openai.generation import Generation, Item


class Chunks(Protocol):
    """Writes the chunks of one answer."""

    async def of(self, item: Item) -> bytes:
        """The events of what is new; b"" where there is nothing to show yet."""
        ...

    def end(self) -> bytes:
        """The events behind the last of it, without DONE."""
        ...


async def streamed(generation: Generation, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """The events. Raises ApiError, before the first of them or behind any. Closing it aborts the work."""
    async with aclosing(generation.items()) as items:
        async for item in items:
            data = await chunks.of(item)
            if data:
                yield data
    yield chunks.end() + DONE
