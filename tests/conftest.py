# SPDX-License-Identifier: MIT OR Apache-2.0
"""Options and fixtures that all tests share.

`--clusters` runs the tests marked `clusters` too, and `--simulation` those of the simulation. `--nightly` runs these
and those marked `nightly`, gives every property test more examples, and raises `scale`. Nothing here imports torch:
tests of the pure parts must run without.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests import journals

# The default run is the same each time and has no clock in it, so that a busy machine cannot fail it.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=2_000, print_blob=True)
NIGHTLY_SCALE = 20
ASKED_FOR = ("clusters", "simulation")  # markers whose tests run where the option of that name is given


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clusters", action="store_true", help="run the tests of clusters, which take minutes")
    parser.addoption("--simulation", action="store_true", help="run the tests of the simulation")
    parser.addoption("--nightly", action="store_true", help="run the nightly tests too, and all with larger numbers")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if config.getoption("--nightly") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    later = ["nightly", *(name for name in ASKED_FOR if not config.getoption(f"--{name}"))]
    left_out = [item for item in items if any(map(item.get_closest_marker, later))]
    items[:] = [item for item in items if not any(map(item.get_closest_marker, later))]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def _journals() -> Iterator[None]:
    """Every engine of the run writes a journal. They stay where a test has failed, and its report tells where."""
    before = os.environ.get(journals.JOURNAL_VAR)
    folder = journals.folder()
    failed_before = journals.num_reported
    yield
    if before is None:
        del os.environ[journals.JOURNAL_VAR]
        if journals.num_reported == failed_before:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "setup":
        journals.begin()
    if report.failed and (lines := journals.report()):
        report.sections.append(("journals; each runs again by", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> int:
    """What a test multiplies its numbers by: 1, and more with --nightly."""
    return NIGHTLY_SCALE if pytestconfig.getoption("--nightly") else 1


@pytest.fixture(autouse=True)
def _rays_own_mode() -> Iterator[None]:
    """A command that a test runs in this process may show Ray this user's token; the next test's Ray may have none."""
    before = os.environ.get("RAY_AUTH_MODE")
    yield
    if before is None:
        os.environ.pop("RAY_AUTH_MODE", None)
    else:
        os.environ["RAY_AUTH_MODE"] = before


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """One thread per sum where the test's file has imported torch: other counts differ in the last bits."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
