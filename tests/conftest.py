# SPDX-License-Identifier: MIT OR Apache-2.0
"""Options and fixtures that all tests share.

`--nightly` runs the tests marked `nightly` too, gives every property test more examples, and raises `scale`. Nothing
here imports torch: tests of the pure parts must run without it.
"""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

# The default run is the same each time and has no clock in it, so that a busy machine cannot fail it.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=2_000, print_blob=True)
NIGHTLY_SCALE = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the nightly tests too, and all with larger numbers")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if config.getoption("--nightly") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> int:
    """What a test multiplies its numbers by: 1, and more with --nightly."""
    return NIGHTLY_SCALE if pytestconfig.getoption("--nightly") else 1


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """One thread per sum where the test's file has imported torch: other counts differ in the last bits."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
