# SPDX-License-Identifier: MIT OR Apache-2.0
"""All tests of this folder run with --simulation, as `make sim` runs them before it draws."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # the marker is looked at when tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker("simulation")
