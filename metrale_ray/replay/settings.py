# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a journal's `Started` to the settings of a replay, and what here is not as it was there.

Rules: what decides what a command means is as recorded: protocol, limits, block size, intervals, seed. Another folder,
another number of ranks, device, dtype, kernels and attention may be chosen. What surrounds an engine (Ray, its name,
its journal, faults raised on purpose) stays behind. Settings that this build does not know are passed over.

What is left out: opening the checkpoint (`ranks`), and what is compared (`comparison`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from metrale_ray.config import EngineConfig
from metrale_ray.errors import JournalError
from metrale_ray.protocol.journal.records import Started
from metrale_ray.protocol.versions import ProtocolVersion

_FILE = "file "  # how the handshake names a file of the checkpoint
# What a start compares and no kernel depends on: these may differ, and the bits stay the same.
_NO_KERNEL = ("python", "ray")
_SURROUNDINGS = ("name", "address", "journal", "faults", "num_cpus_per_rank", "num_gpus_per_rank", "pin")
_MODE = "attention_over_ranks"  # by which name the handshake compares what `auto` became
_VERSIONS = {version.value: version for version in ProtocolVersion}


def replay_config(
    started: Started,
    *,
    model: str | None = None,
    ep_size: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    kernels: str | None = None,
    attention: str | None = None,
    attention_backend: str | None = None,
) -> EngineConfig:
    """The recorded settings with those given here; None: as recorded.

    Raises JournalError for a journal that cannot be replayed, ConfigError for a setting that is wrong.
    """
    if started.redacted:
        raise JournalError(
            "this journal leaves prompts, tokens and frames out (journal_redact), so it cannot be run again; "
            "inspect-journal shows what it has. Record without journal_redact to replay."
        )
    if started.version not in _VERSIONS:
        raise JournalError(f"this journal is of protocol version {started.version}, which this build does not know")
    known = {field.name for field in dataclasses.fields(EngineConfig)} - set(_SURROUNDINGS)
    recorded = {name: value for name, value in started.config.items() if name in known}
    given = {
        "model": model,
        "ep_size": ep_size,
        "device": device,
        "dtype": dtype,
        "quantization": quantization,
        "kernels": kernels,
        "attention": attention,
        "attention_backend": attention_backend,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    resolved = {"ep_protocol": _VERSIONS[started.version].label}
    if recorded.get("attention") == "auto" and _MODE in started.must_equal:
        resolved["attention"] = started.must_equal[_MODE]
    if model is not None:
        chosen["revision"] = None
    if "model" not in recorded | chosen:
        raise JournalError("this journal does not say which model it is of; name one with --model")
    return EngineConfig(**{**recorded, **resolved, **chosen})


def recorded_threads(started: Started) -> int | None:
    """The threads that each rank computed with; None where it is not said, as for a GPU."""
    threads = started.must_equal.get("threads", "")
    return int(threads) if threads.isdecimal() else None


def file_differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each file of the checkpoint that is another one here, or is missing on one side."""
    return _differences(recorded, here, {name for name in recorded.keys() | here.keys() if name.startswith(_FILE)})


def kernel_differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each thing that decides the last bits of a result and is another one here."""
    names = {name for name in recorded.keys() | here.keys() if not name.startswith(_FILE) and name not in _NO_KERNEL}
    return _differences(recorded, here, names)


def _differences(recorded: Mapping[str, str], here: Mapping[str, str], names: set[str]) -> tuple[str, ...]:
    return tuple(
        f"{name}: recorded {_shown(recorded.get(name))}, here {_shown(here.get(name))}"
        for name in sorted(names)
        if recorded.get(name) != here.get(name)
    )


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value)
