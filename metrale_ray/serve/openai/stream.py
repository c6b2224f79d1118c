# SPDX-License-Identifier: MIT OR Apache-2.0
"""`streamed`: one call's answer as the bytes of server-sent events.

Rules. All that is new at once is one bytes object. Nothing is given before the engine's first output, so a refusal is
an error and no stream; a later failure is an error event, and then the stream ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.openai.events import DONE, error_event
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
    """The events. Raises ApiError when there was none yet. Closing it aborts the work."""
    has_started = False
    async with aclosing(generation.items()) as items:
        try:
            async for item in items:
                data = await chunks.of(item)
                if data:
                    yield data
                    has_started = True
        except ApiError as error:
            if not has_started:
                raise
            yield error_event(error)
            return
    yield chunks.end() + DONE
