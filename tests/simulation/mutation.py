# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Mutation`: one mistake that is made on purpose for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True, slots=True)
class Mutation:
    """While `apply()` lasts, the mistake is made."""

    name: str
    apply: Callable[[], AbstractContextManager[Any]]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """The attribute `name` of `owner` is what `make` makes of it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))
