# SPDX-License-Identifier: MIT OR Apache-2.0
"""Typed reading of config.json: each value is checked where it is read, and a fault names its key.

Leaves out: the meaning of the values, which is the family's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.errors import CheckpointError
from metrale_ray.model.layers.activation import ACTIVATIONS

_MISSING = object()


class ConfigReader:
    """The keys of one config.json. A key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def count(self, key: str, default: Any = _MISSING, at_least: int = 1) -> int:
        """An integer of at least `at_least`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self._fault(key, value, f"an integer of at least {at_least}")
        return value

    def count_or_none(self, key: str, default: int | None) -> int | None:
        """An integer of at least 1, None when the key is null, and `default` only when it is not there at all."""
        if key not in self.values:
            return default
        return self.count(key) if self.has(key) else None

    def positive(self, key: str, default: Any = _MISSING) -> float:
        """A number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._fault(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._fault(key, value, "true or false")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of integers of at least 0; empty when absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
            raise self._fault(key, value, "a list of integers of at least 0")
        return tuple(value)

    def one_name(self, *keys: str) -> int:
        """A count that may be written under any of several keys; where more are there, they must agree."""
        found = {key: self.count(key, at_least=0) for key in keys if self.has(key)}
        if not found:
            raise CheckpointError(f"{self.where} has none of {', '.join(keys)}")
        if len(set(found.values())) > 1:
            raise CheckpointError(f"{self.where} contradicts itself: {found}")
        return next(iter(found.values()))

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        """The name of a known activation function."""
        value = self._get(key, default)
        if value not in ACTIVATIONS:
            raise self._fault(key, value, f"one of {', '.join(sorted(ACTIVATIONS))}")
        return str(value)

    def refuse(self, key: str, why: str) -> None:
        """Refuse the checkpoint when `key` is there, as the reference would read it and this engine does not."""
        if self.has(key):
            raise CheckpointError(f"{self.where} sets {key} to {self.values[key]!r}, which is not supported: {why}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.where} has no {key}")
        return default

    def _fault(self, key: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.where} sets {key} to {value!r}; it must be {allowed}")
