# SPDX-License-Identifier: MIT OR Apache-2.0
"""`HttpMetrics`: what the HTTP side tells whoever counts, and asks of it. `NoMetrics` counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from metrale_ray.serve.openai.call import Meter, NoMeter


class HttpMetrics(Protocol):
    """Every method is called on the loop, and is quick."""

    def add_engine(self, model_name: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Show the figures of a model's engine too."""
        ...

    def meter(self, model_name: str, kind: str) -> Meter:
        """For one request to a model; `kind` is "chat" or "completion"."""
        ...

    def http_began(self) -> None:
        """A request came."""
        ...

    def http_ended(self, route: str, status: int, duration_s: float) -> None:
        """It has its answer. `route` is one of the app's own, or "other". Status 499: its client has gone."""
        ...

    def rejected(self, code: str) -> None:
        """It was turned away or failed, with this code of ours."""
        ...

    def exposition(self) -> tuple[bytes, str]:
        """All figures as Prometheus reads them, and their content type."""
        ...


class NoMetrics:
    """Nobody counts."""

    def add_engine(self, model_name: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Not shown."""

    def meter(self, model_name: str, kind: str) -> Meter:
        """One that counts nothing."""
        return NoMeter()

    def http_began(self) -> None:
        """Not counted."""

    def http_ended(self, route: str, status: int, duration_s: float) -> None:
        """Not counted."""

    def rejected(self, code: str) -> None:
        """Not counted."""

    def exposition(self) -> tuple[bytes, str]:
        """Empty."""
        return b"", "text/plain; version=0.0.4; charset=utf-8"
