# SPDX-License-Identifier: MIT OR Apache-2.0
"""From what a journal says of its engine to the settings of a replay."""

from __future__ import annotations

import dataclasses

import pytest

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError, JournalError
from metrale_ray.protocol.journal.records import Started
from metrale_ray.replay.settings import file_differences, kernel_differences, recorded_threads, replay_config


def started(**changes: object) -> Started:
    config = EngineConfig(model="/models/a", revision="main", ep_size=3, address="ray://far", name="mine", seed=4)
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "faults"}
    first = Started(1, 0.0, "1", 1, 2, False, values, {"threads": "2"}, ({}, {}, {}), 9, 0, ())
    return dataclasses.replace(first, **changes)  # type: ignore[arg-type]


def test_what_was_recorded_is_kept_but_for_its_surroundings() -> None:
    config = replay_config(started())
    assert (config.model, config.revision, config.ep_size, config.seed) == ("/models/a", "main", 3, 4)
    assert (config.address, config.name, config.journal, config.faults) == (None, None, None, ())
    assert config.ep_protocol == "v2"
    assert replay_config(started(version=1)).ep_protocol == "v1"


def test_what_is_given_wins() -> None:
    config = replay_config(started(), model="/b", ep_size=1, device="cpu", dtype="float32", attention_backend="sdpa")
    assert (config.model, config.revision, config.ep_size) == ("/b", None, 1)
    assert (config.device, config.dtype, config.attention_backend) == ("cpu", "float32", "sdpa")


def test_settings_of_another_build_are_passed_over() -> None:
    first = started()
    config = replay_config(dataclasses.replace(first, config={**first.config, "of_a_later_build": 5}))
    assert config == replay_config(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"redacted": True}, "Record without journal_redact"),
        ({"version": 9}, "protocol version 9"),
        ({"config": {}}, "name one with --model"),
    ],
)
def test_what_cannot_be_replayed_is_said(changes: dict[str, object], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        replay_config(started(**changes))


def test_a_wrong_setting_is_refused_as_everywhere() -> None:
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        replay_config(started(), dtype="int3")


def test_threads_are_known_where_they_decide_bits() -> None:
    assert recorded_threads(started()) == 2
    assert recorded_threads(started(must_equal={"threads": "any"})) is None
    assert recorded_threads(started(must_equal={})) is None


def test_files_and_kernels_are_told_apart_and_what_decides_no_bits_is_neither() -> None:
    recorded = {"torch": "1", "python": "3.11", "ray": "2", "file a": "x", "file b": "y"}
    here = {"torch": "2", "python": "3.12", "ray": "3", "file a": "x", "file c": "z", "dtype": "bf16"}
    assert file_differences(recorded, here) == ("file b: recorded 'y', here none", "file c: recorded none, here 'z'")
    assert kernel_differences(recorded, here) == ("dtype: recorded none, here 'bf16'", "torch: recorded '1', here '2'")
