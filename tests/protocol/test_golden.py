# SPDX-License-Identifier: MIT OR Apache-2.0
"""The bytes of every message stay what they were, and old bytes stay readable."""

from __future__ import annotations

import pytest

from tests.protocol.samples import from_bytes, golden_messages, to_bytes
from tests.protocol.write_golden import FOLDER, golden_path, read_golden

KEPT = [(version, name) for version in (1, 2) for name in golden_messages(version)]


@pytest.mark.parametrize(("version", "name"), KEPT)
def test_a_message_is_the_bytes_that_its_golden_file_holds(version: int, name: str) -> None:
    assert to_bytes(golden_messages(version)[name], version) == read_golden(golden_path(version, name))


@pytest.mark.parametrize(("version", "name"), KEPT)
def test_the_bytes_of_a_golden_file_are_read_as_the_message(version: int, name: str) -> None:
    assert from_bytes(read_golden(golden_path(version, name)), name) == golden_messages(version)[name]


def test_every_golden_file_belongs_to_a_message() -> None:
    assert {p.name for p in FOLDER.glob("*.hex")} == {golden_path(version, name).name for version, name in KEPT}
