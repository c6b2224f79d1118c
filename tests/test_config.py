# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings: what is wrong is refused with what was given and what is allowed, and is resolved once."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.config import (
    ATTENTION_BACKENDS,
    ATTENTIONS,
    DTYPES,
    FAULT_KINDS,
    KERNELS,
    LOG_LEVELS,
    PHASES,
    PLACEMENTS,
    QUANTIZATIONS,
    EngineConfig,
    FaultSpec,
    from_mapping,
    from_yaml,
    parse_size_bytes,
    thread_limit,
    warn_unknown_variables,
)
from metrale_ray.errors import ConfigError
from metrale_ray.protocol.versions import ProtocolVersion

COUNTS = ("ep_size", "max_batch_size", "max_num_batched_tokens", "block_size", "max_queue_len")
OPTIONAL_COUNTS = ("max_model_len", "kv_cache_memory")
SECONDS = ("start_timeout_s", "placement_timeout_s", "step_timeout_s", "idle_ping_s", "journal_max_age_s")
CHOICES = {
    "dtype": DTYPES,
    "attention": ATTENTIONS,
    "attention_backend": ATTENTION_BACKENDS,
    "kernels": KERNELS,
    "quantization": QUANTIZATIONS,
    "placement": PLACEMENTS,
    "log_level": LOG_LEVELS,
}


def refusal(**settings: Any) -> str:
    """The message of the ConfigError that these settings raise."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", **settings})
    return caught.value.message


def bad_values() -> list[tuple[str, Any, str]]:
    """Every setting with values that it refuses, and what the message says is allowed."""
    rows: list[tuple[str, Any, str]] = []
    no_counts: tuple[Any, ...] = (0, -1, 1.0, True, "4", math.inf)
    rows += [(name, v, "an integer of at least 1") for name in COUNTS for v in (*no_counts, None)]
    rows += [(name, v, "an integer of at least 1") for name in OPTIONAL_COUNTS for v in no_counts]
    no_seconds: tuple[Any, ...] = (0, -1.5, True, "1", None, math.nan, math.inf)
    rows += [(name, v, "a number of seconds above 0") for name in SECONDS for v in no_seconds]
    rows += [(name, v, ", ".join(CHOICES[name])) for name in CHOICES for v in ("", "Auto!", None, 3, ["auto"])]
    rows += [("model", v, "a checkpoint folder or a hub id") for v in ("", None, 3)]
    rows += [(name, v, "a text that is not empty") for name in ("revision", "address", "journal") for v in ("", 7)]
    rows += [("name", v, "1 to 64 letters, digits, dots, dashes") for v in ("", "a b", "a/b", "x" * 65, 7)]
    rows += [("ep_protocol", v, "'v1' and 'v2'") for v in ("", "v3", "V1", "1", 1)]
    rows += [("device", v, "auto, cpu, cuda and cuda:N") for v in ("", "gpu", "cuda:", "cuda:x", 0, None)]
    rows += [("watermark", v, "from 0 to below 1") for v in (-0.1, 1, 1.5, True, "0.1", None, math.nan)]
    rows += [("num_cpus_per_rank", v, "a number above 0") for v in (0, -1, True, "1", math.inf)]
    rows += [("num_gpus_per_rank", v, "a number from 0") for v in (-1, -0.5, True, "1", math.nan)]
    rows += [("agreement_interval", v, "an integer of at least 0") for v in (-1, 1.0, True, None, "4")]
    rows += [("journal_max_size", v, "an integer of at least 1048576") for v in (0, -1, 2**20 - 1, True, None, 1.5)]
    rows += [(name, v, "true or false") for name in ("pin", "scrub", "journal_redact") for v in (0, "yes", None)]
    rows += [("seed", v, "an integer") for v in (-1, 2**64, 1.0, True, None, "0")]
    return rows


@pytest.mark.parametrize(("name", "value", "allowed"), bad_values())
def test_a_bad_value_is_refused_with_the_value_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert repr(value) in message
    assert allowed in message


def test_every_setting_has_bad_values_in_these_tests() -> None:
    tested = {name for name, _, _ in bad_values()} | {"faults"}
    assert tested == {f.name for f in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize(
    "settings",
    [
        {"ep_size": 1, "max_batch_size": 1, "block_size": 1, "max_model_len": 1, "kv_cache_memory": 1},
        {"device": "cuda:12", "dtype": "bfloat16", "placement": "STRICT_SPREAD", "log_level": "debug"},
        {"seed": 2**64 - 1, "watermark": 0, "num_gpus_per_rank": 0.5, "step_timeout_s": 1},
        {"agreement_interval": 0, "scrub": True, "journal": "j", "journal_max_size": 2**20, "ep_protocol": "v2"},
        {"seed": 0, "watermark": 0.999, "num_gpus_per_rank": 0, "ep_protocol": "v1", "revision": "main"},
    ],
)
def test_values_at_the_edge_of_what_is_allowed_are_taken(settings: dict[str, Any]) -> None:
    config = EngineConfig(model="m", **settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_a_configuration_cannot_be_changed() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ep_size = 2  # type: ignore[misc]


def test_a_scrub_is_refused_where_the_protocol_cannot_say_it() -> None:
    assert "scrub needs protocol v2" in refusal(scrub=True, ep_protocol="v1")


# Faults


@pytest.mark.parametrize(
    ("fault", "allowed"),
    [
        ({"rank": 0, "phase": "later"}, ", ".join(PHASES)),
        ({"rank": 0, "phase": "before", "kind": "explode"}, ", ".join(FAULT_KINDS)),
        ({"rank": -1, "phase": "before"}, "an integer of at least 0"),
        ({"rank": 0, "phase": "before", "layer": "x"}, "an integer of at least 0"),
        ({"rank": None, "phase": "before"}, "an integer of at least 0"),
        ({"rank": 0, "phase": "before", "first_token": True}, "an integer of at least 0"),
        ({"rank": 0, "phase": "before", "command": -1}, "an integer of at least 0"),
        ({"rank": 2, "phase": "before"}, "ranks are 0 to 1"),
        ({"phase": "before"}, "a mapping with a rank and a phase"),
        ({"rank": 0, "phase": "before", "when": 1}, "a mapping with a rank and a phase"),
        ({"rank": 0, "phase": "before", "kind": "flip_kv", "tensor": "head"}, "leave out tensor 'head'"),
        ({"rank": 0, "phase": "before", "kind": "flip_weight", "bit": 2}, "it must be 0 or 1"),
        ({"rank": 0, "phase": "before", "kind": "flip_weight", "bit": True}, "it must be 0 or 1"),
        ("kill", "a mapping with a rank and a phase"),
    ],
)
def test_a_bad_fault_is_refused(fault: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"model": "m", "ep_size": 2, "faults": [fault]})
    assert allowed in caught.value.message


def test_faults_that_are_no_list_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a list of faults"):
        from_mapping({"model": "m", "faults": "kill"})


def test_faults_may_be_mappings_or_made_already() -> None:
    made = FaultSpec(rank=1, phase="inside")
    config = from_mapping({"model": "m", "ep_size": 2, "faults": [made, {"rank": 0, "phase": "reply", "kind": "kill"}]})
    assert config.faults == (made, FaultSpec(rank=0, phase="reply", kind="kill"))


# Mappings and YAML


def test_names_may_have_dashes_and_the_batch_size_its_other_name() -> None:
    config = from_mapping({"model": "m", "ep-size": 4, "max-num-seqs": 7, "max_model_len": 9})
    assert (config.ep_size, config.max_batch_size, config.max_model_len) == (4, 7, 9)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ep_sise", "'ep_size'"),
        ("max-batchsize", "'max_batch_size'"),
        ("zzzz", "known are address, agreement_interval, attention"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"model": "m", name: 1})
    assert repr(name) in caught.value.message
    assert near in caught.value.message


def test_a_setting_given_by_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_batch_size is given twice, the second time as 'max-num-seqs'"):
        from_mapping({"model": "m", "max_batch_size": 2, "max-num-seqs": 2})


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model given: set `model`"):
        from_mapping({"ep_size": 2})


def test_settings_of_a_file_are_merged_with_flags_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: from-file\nep_size: 2\nstep_timeout_s: 5\n")
    config = from_mapping({**from_yaml(file), "ep_size": 3})
    assert (config.model, config.ep_size, config.step_timeout_s) == ("from-file", 3, 5)


def test_an_empty_file_has_no_settings(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert from_yaml(tmp_path / "empty.yaml") == {}


def test_a_flag_wins_over_a_setting_that_a_file_writes_with_dashes(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("max-num-seqs: 2\n")
    assert {**from_yaml(tmp_path / "engine.yaml"), "max_batch_size": 3} == {"max_batch_size": 3}


def test_an_unknown_setting_in_a_file_is_refused_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("ep_sise: 2\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml: unknown setting 'ep_sise'; did you mean 'ep_size'"):
        from_yaml(tmp_path / "engine.yaml")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("1000", 1000),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2**31),
        ("1.5GB", 1_500_000_000),
        ("0.1 kb", 100),
        (" 3 TiB ", 3 * 2**40),
        ("7b", 7),
    ],
)
def test_a_size_may_have_a_unit(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text, "x") == size_bytes
    assert from_mapping({"model": "m", "kv-cache-memory": text}).kv_cache_memory == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 G", "2GiB/s", "1.2.3", "١", "0x10"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"model": "m", "kv_cache_memory": text})
    assert caught.value.message.startswith(f"kv_cache_memory is {text!r}; it must be bytes, such as ")


@given(number=st.integers(1, 2**50), unit=st.sampled_from(["KiB", "MiB", "GB"]))
def test_a_whole_number_of_units_is_exact(number: int, unit: str) -> None:
    factor = {"KiB": 2**10, "MiB": 2**20, "GB": 10**9}[unit]
    assert parse_size_bytes(f"{number}{unit}", "x") == number * factor


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [", "is not valid YAML"),
        (b"- a\n- b\n", "must hold a mapping of settings to values, not a list"),
        (b"just text", "not a str"),
        (b"model: \xff\xfe", "is not UTF-8 text"),
        (b"model: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_path(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        from_yaml(file)
    assert str(file) in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model: m\napi_key: "SECRET-KEY\n', "found unexpected end of stream (line 3, column 1)"),
        ("api_key: [SECRET-KEY, {", "expected the node content, but found '<stream end>' (line 1, column 24)"),
        ("api_key: [SECRET-KEY\nmodel: m", "expected ',' or ']', but got ':' (line 2, column 6)"),
        ("api_key: *SECRET-KEY", "found undefined alias what is there (line 1, column 10)"),
        ("api_key: !SECRET-KEY x", "could not determine a constructor for the tag what is there (line 1, column 10)"),
        ("api_key: SECRET-KEY\nseen: 2024-13-01", "month must be in 1..12"),
        ("api_key: SECRET-KEY\x00", "unacceptable character #x0000: special characters are not allowed"),
    ],
)
def test_an_error_in_a_file_says_where_and_shows_no_text_of_it(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_yaml(file)
    assert message in caught.value.message
    assert "SECRET" not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        from_yaml(tmp_path)


# The protocol's version


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        (None, {}, "v2"),
        (None, {"METRALE_EP_PROTOCOL": "v1"}, "v1"),
        ("v2", {"METRALE_EP_PROTOCOL": "v1"}, "v2"),
        ("v1", {"METRALE_EP_PROTOCOL": "v2"}, "v1"),
    ],
)
def test_the_setting_wins_over_the_environment(setting: str | None, environment: dict[str, str], expected: str) -> None:
    config = EngineConfig(model="m", ep_protocol=setting).resolved(environment)
    assert config.ep_protocol == expected
    assert config.protocol_version.label == expected


def test_the_environment_of_the_process_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_EP_PROTOCOL", "v1")
    assert EngineConfig(model="m", max_batch_size=1).resolved().protocol_version is ProtocolVersion.V1


def test_a_bad_version_in_the_environment_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="METRALE_EP_PROTOCOL is 'v9'; allowed are 'v1' and 'v2'"):
        EngineConfig(model="m").resolved({"METRALE_EP_PROTOCOL": "v9"})


def test_v1_forces_one_slot_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = EngineConfig(model="m", ep_protocol="v1", max_batch_size=32).resolved({})
    assert config.max_batch_size == 1
    assert "protocol v1 has one slot: max_batch_size 32 becomes 1" in caplog.text


def test_v1_with_one_slot_and_v2_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    EngineConfig(model="m", ep_protocol="v1", max_batch_size=1).resolved({})
    config = EngineConfig(model="m", max_batch_size=32).resolved({})
    assert config.max_batch_size == 32
    assert caplog.text == ""


@given(version=st.sampled_from(["v1", "v2", None]), size=st.integers(1, 1000))
def test_resolving_twice_changes_nothing_more(version: str | None, size: int) -> None:
    once = EngineConfig(model="m", ep_protocol=version, max_batch_size=size).resolved({})
    assert once.resolved({"METRALE_EP_PROTOCOL": "v1"}) == once


def test_a_folder_here_is_given_to_the_ranks_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "here").symlink_to(tmp_path / "owner")  # another node may have another folder behind the name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model, absolute in (
        ("owner/name", tmp_path / "owner" / "name"),
        ("./owner/../owner/name/", tmp_path / "owner" / "name"),
        ("here", tmp_path / "here"),
        ("~/owner", tmp_path / "owner"),
        (".", tmp_path),
    ):
        assert EngineConfig(model=model).resolved({}).model == str(absolute)


@pytest.mark.parametrize("model", ["owner/none", "name", "~nobody-of-this-name/m", "a" * 5000, "a\0b"])
def test_what_is_no_folder_here_is_given_to_the_ranks_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert EngineConfig(model=model).resolved({}).model == model


# Environment variables


@pytest.mark.parametrize(
    ("text", "limit"),
    [("4", 4), (" 2 ", 2), ("8,4,2", 8), ("1,", 1), ("0", None), ("-1", None), ("", None), ("x", None), ("1.5", None)],
)
def test_openmps_own_variable_limits_the_threads_where_it_is_a_number(text: str, limit: int | None) -> None:
    assert thread_limit({"OMP_NUM_THREADS": text}) == limit
    assert thread_limit({}) is None


def test_unknown_variables_are_told_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"METRALE_EP_PROTOCOLL": "v1", "METRALE_CACHE_DIR": "x", "PATH": "y", "METRALE_QQ": ""}
    messages = warn_unknown_variables(environment)
    assert messages[0] == "unknown environment variable METRALE_EP_PROTOCOLL; did you mean 'METRALE_EP_PROTOCOL'?"
    assert messages[1].startswith("unknown environment variable METRALE_QQ; ")
    assert len(messages) == 2
    assert all(message in caplog.text for message in messages)


def test_known_variables_and_those_of_others_are_not_told() -> None:
    assert warn_unknown_variables({"METRALE_EP_PROTOCOL": "v1", "METRALE_LOG_LEVEL": "info", "RAY_ADDRESS": "x"}) == []


@pytest.mark.parametrize(("name", "limit"), [("max_batch_size", 4096), ("max_num_batched_tokens", 2**20)])
def test_no_setting_asks_for_more_than_one_command_can_hold(name: str, limit: int) -> None:
    assert getattr(EngineConfig(model="m", **{name: limit}), name) == limit
    with pytest.raises(ConfigError, match=f"{name} is {limit + 1}; one command holds up to {limit}"):
        EngineConfig(model="m", **{name: limit + 1})


def test_a_journal_of_the_environment_is_told_and_a_setting_wins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="metrale_ray.config")
    assert EngineConfig(model="m", journal="/given").resolved({"METRALE_JOURNAL": "/of/env"}).journal == "/given"
    assert caplog.text == ""
    assert EngineConfig(model="m").resolved({"METRALE_JOURNAL": "/of/env"}).journal == "/of/env"
    assert "METRALE_JOURNAL: the engine writes a journal, with prompts and answers, into /of/env" in caplog.text
    caplog.clear()
    assert EngineConfig(model="m", journal_redact=True).resolved({"METRALE_JOURNAL": "/of/env"}).journal == "/of/env"
    assert caplog.text == ""
    assert EngineConfig(model="m").resolved({}).journal is None
    assert EngineConfig(model="m", journal_redact=True).resolved({}).journal is None
    assert "journal_redact does nothing without a journal" in caplog.text
