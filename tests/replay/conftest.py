# SPDX-License-Identifier: MIT OR Apache-2.0
"""One tiny model, and journals of it, for all tests of replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.tiny import write_tiny
from tests.replay.journals import Recorded, busy_script, record


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("replayed"), "qwen3_moe", num_hidden_layers=2)


@pytest.fixture(scope="session")
def recorded(model: Path) -> Recorded:
    """A busy engine of two ranks. Nobody changes its records."""
    return record(model, busy_script, ep_size=2)
