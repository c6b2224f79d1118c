# SPDX-License-Identifier: MIT OR Apache-2.0
"""A served model without an engine, for what is decided before one is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.errors import EngineDead
from metrale_ray.serve.backend import GenerationDefaults, Health, ServedModel
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.front import Front


class NoEngine:
    """A backend whose engine never comes."""

    def front(self) -> Front:
        """None is there."""
        raise ApiError(503, "there is no engine", code="engine_unavailable")

    def health(self) -> Health:
        """Not ready."""
        return Health(False, "there is no engine", True, "")

    def figures(self) -> Mapping[str, Any]:
        """None."""
        return {}

    async def explain(self, seen: EngineDead) -> EngineDead:
        """What was seen."""
        return seen


def model(defaults: GenerationDefaults | None = None) -> ServedModel:
    """A model of 100 tokens."""
    return ServedModel(("m",), NoEngine(), None, None, defaults or GenerationDefaults(), max_model_len=100, created=1)
