# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tiny checkpoints, written once per run, and their references in transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny import reference, write_tiny
from tests.model.variants import DENSE, VARIANTS


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's checkpoint."""

    @cache
    def write(variant: str) -> Path:
        family, changes = {**VARIANTS, **DENSE}[variant]
        return write_tiny(tmp_path_factory.mktemp("tiny"), family, **changes)

    return write


@pytest.fixture(scope="session")
def tiny_reference(tiny: Callable[[str], Path]) -> Callable[[str], Any]:
    """A variant's model in transformers, fp32."""
    return cache(lambda variant: reference(tiny(variant)))
