# SPDX-License-Identifier: MIT OR Apache-2.0
"""All checks: the public functions of the files in `areas`, each with the features that it needs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType

from tests.conformance.areas import (
    chat,
    completions,
    errors,
    keys,
    logprobs,
    models,
    sampling,
    schemas,
    token_prompts,
    tools,
)
from tests.conformance.target import Target

AREAS = (models, chat, completions, token_prompts, sampling, logprobs, schemas, tools, errors, keys)


@dataclass(frozen=True)
class Check:
    """One check. It raises AssertionError, or an error of the client, when the server does not conform."""

    name: str
    needs: tuple[str, ...]
    function: Callable[[Target], Awaitable[None] | None]

    def missing(self, target: Target) -> str | None:
        """Why it cannot be run against `target`, or None."""
        absent = [need for need in self.needs if need in target.missing]
        return f"without {', '.join(absent)}" if absent else None

    def run(self, target: Target) -> None:
        """Check `target`."""
        awaited = self.function(target)
        if inspect.iscoroutine(awaited):
            asyncio.run(awaited)


def all_checks() -> list[Check]:
    """Every check, in the order of the files."""
    return [check for area in AREAS for check in _checks_of(area)]


def _checks_of(area: ModuleType) -> list[Check]:
    functions = [value for value in vars(area).values() if inspect.isfunction(value)]
    return [
        Check(function.__name__, area.NEEDS, function)
        for function in functions
        if function.__module__ == area.__name__ and list(inspect.signature(function).parameters) == ["target"]
    ]
