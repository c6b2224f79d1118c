# SPDX-License-Identifier: MIT OR Apache-2.0
"""Typed reading of config.json: each value is checked where it is read, and a fault names its key.

Rules: a file may hold any JSON value at any key, and whatever it holds is a value of the right type within the limits
below, or a CheckpointError. Leaves out: the meaning of the values, which is the family's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metrale_ray.errors import CheckpointError
from metrale_ray.model.excerpt import excerpt
from metrale_ray.model.layers.activation import ACTIVATIONS

# Positions and token ids are 32-bit integers, and so is every size that kernels count with.
MAX_COUNT = 2**31 - 1
# Each layer takes memory before a weight is read; the deepest models have some hundreds.
MAX_LAYERS = 10_000
# Numbers are computed with in fp32; one that it does not hold would become 0 or infinity there.
MIN_NUMBER, MAX_NUMBER = 1.2e-38, 3.4e38

_MISSING = object()


class ConfigReader:
    """The keys of one config.json. A key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def count(self, key: str, default: Any = _MISSING, at_least: int = 1, at_most: int = MAX_COUNT) -> int:
        """An integer from `at_least` to `at_most`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self._fault(key, value, f"an integer from {at_least} to {at_most}")
        return value

    def count_or_none(self, key: str, default: int | None) -> int | None:
        """An integer of at least 1, None when the key is null, and `default` only when it is not there at all."""
        if key not in self.values:
            return default
        return self.count(key) if self.has(key) else None

    def num_layers(self) -> int:
        """How many layers there are."""
        return self.count("num_hidden_layers", at_most=MAX_LAYERS)

    def positive(self, key: str, default: Any = _MISSING) -> float:
        """A number above 0 that fp32 holds."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_NUMBER <= value <= MAX_NUMBER:
            raise self._fault(key, value, f"a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}")
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

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty when absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._fault(key, value, "a list of texts")
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
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self._fault(key, value, f"one of {', '.join(sorted(ACTIVATIONS))}")
        return value

    def refuse(self, key: str, why: str) -> None:
        """Refuse the checkpoint when `key` is there, as the reference would read it and this engine does not."""
        if self.has(key):
            raise CheckpointError(
                f"{self.where} sets {key} to {excerpt(self.values[key])}, which is not supported: {why}"
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.where} has no {key}")
        return default

    def _fault(self, key: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.where} sets {key} to {excerpt(value)}; it must be {allowed}")
