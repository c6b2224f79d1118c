# SPDX-License-Identifier: MIT OR Apache-2.0
"""The protocol's version is chosen once, and a bad choice is refused by the name of where it came from."""

from __future__ import annotations

import pytest

from metrale_ray.errors import ConfigError
from metrale_ray.protocol.versions import (
    ENV_VAR,
    ProtocolVersion,
    parse_version,
    resolve_version,
    worker_default_version,
)

BAD = ["", "v0", "v3", "V1", "1", " v1", "v1 ", "2"]


def test_the_variable_has_the_name_that_users_know() -> None:
    assert ENV_VAR == "METRALE_EP_PROTOCOL"


@pytest.mark.parametrize("version", list(ProtocolVersion))
def test_a_label_names_its_version(version: ProtocolVersion) -> None:
    assert parse_version(version.label, "x") is version


def test_there_are_two_versions_with_their_numbers_on_the_wire() -> None:
    assert [(v.label, int(v)) for v in ProtocolVersion] == [("v1", 1), ("v2", 2)]


@pytest.mark.parametrize("text", BAD)
def test_another_label_is_refused_with_its_source_and_both_versions(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_version(text, "the flag")
    assert caught.value.message.startswith(f"the flag is {text!r}; allowed are 'v1' and 'v2'.")


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        (None, None, ProtocolVersion.V2),
        (None, "v1", ProtocolVersion.V1),
        (None, "v2", ProtocolVersion.V2),
        ("v1", "v2", ProtocolVersion.V1),
        ("v2", "v1", ProtocolVersion.V2),
        ("v1", None, ProtocolVersion.V1),
    ],
)
def test_the_head_takes_the_setting_then_the_variable_then_v2(
    setting: str | None, environment: str | None, expected: ProtocolVersion
) -> None:
    assert resolve_version(setting, environment) is expected


def test_a_bad_variable_does_not_matter_where_there_is_a_setting() -> None:
    assert resolve_version("v1", "nonsense") is ProtocolVersion.V1


@pytest.mark.parametrize("text", BAD)
def test_a_bad_setting_and_a_bad_variable_are_refused_by_their_names(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^ep_protocol is "):
        resolve_version(text, "v2")
    with pytest.raises(ConfigError, match=r"^METRALE_EP_PROTOCOL is "):
        resolve_version(None, text)
    with pytest.raises(ConfigError, match=r"^METRALE_EP_PROTOCOL is "):
        worker_default_version(text)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [(None, ProtocolVersion.V1), ("v1", ProtocolVersion.V1), ("v2", ProtocolVersion.V2)],
)
def test_a_worker_without_a_configuration_takes_the_variable_then_v1(
    environment: str | None, expected: ProtocolVersion
) -> None:
    assert worker_default_version(environment) is expected
