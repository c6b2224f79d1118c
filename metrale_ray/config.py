# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine's settings: frozen, validated once, the same for every rank.

Rules: a field that is None is resolved once, on the side that can know it, and the resolved value is given to every
rank; a node's own environment never decides anything. Only this file and `cli` read the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from metrale_ray.errors import ConfigError
from metrale_ray.protocol.versions import ENV_VAR, ProtocolVersion, resolve_version

log = logging.getLogger(__name__)

Phase = Literal["validation", "before", "inside", "after", "reply"]
PHASES: tuple[Phase, ...] = ("validation", "before", "inside", "after", "reply")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LOG_LEVELS = ("debug", "info", "warning", "error")
KNOWN_VARIABLES = (ENV_VAR, "METRALE_CACHE_DIR", "METRALE_LOG_LEVEL")


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One fault to raise on purpose, for tests; set in the configuration and reachable in no other way.

    It fires on `rank`, at `phase`, in the `layer`-th reduction of a step (phases before, inside and after only).
    Keyed by sequence (`first_token`: the sequence whose token at position 0 this is) it fires at each run of that
    sequence; keyed by `command` (the number in the epoch) it fires once. `cmd` narrows it to one command name. `kind`:
    "fail" raises, "poison" raises SlotPoisoned for the sequence's slot, "kill" ends the process, "stop" stops it
    (SIGSTOP), "diverge" corrupts the rank's digest. `blame` says whether the error names the slot.
    """

    rank: int
    phase: Phase
    kind: Literal["fail", "poison", "kill", "stop", "diverge"] = "fail"
    layer: int = 0
    first_token: int | None = None
    command: int | None = None
    cmd: str | None = None
    blame: bool = False
    message: str = "injected fault"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine can be told. Names are the flags' names with underscores.

    Units: `kv_cache_memory` in bytes per rank; `*_s` in seconds. None means: chosen at start, see docs.
    """

    model: str
    revision: str | None = None
    ep_size: int = 1
    max_batch_size: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    dtype: str = "auto"
    device: str = "auto"
    ep_protocol: str | None = None
    kv_cache_memory: int | None = None
    block_size: int = 16
    watermark: float = 0.01
    max_queue_len: int = 10_000
    seed: int = 0
    address: str | None = None
    placement: str = "PACK"
    num_cpus_per_rank: float | None = None
    num_gpus_per_rank: float | None = None
    log_level: str = "warning"
    start_timeout_s: float = 600.0
    placement_timeout_s: float = 30.0
    step_timeout_s: float = 60.0
    idle_ping_s: float = 2.0
    faults: tuple[FaultSpec, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def protocol_version(self) -> ProtocolVersion:
        """The protocol version of `ep_protocol`; v2 where nothing was resolved."""
        return resolve_version(self.ep_protocol, None)

    def resolved(self, environment: Mapping[str, str] | None = None) -> EngineConfig:
        """This configuration with the protocol version settled from the environment, and v1's limit applied."""
        variables = os.environ if environment is None else environment
        version = resolve_version(self.ep_protocol, variables.get(ENV_VAR))
        changes: dict[str, Any] = {"ep_protocol": version.label}
        if version is ProtocolVersion.V1 and self.max_batch_size != 1:
            log.warning("protocol v1 has one slot: max_batch_size %d becomes 1", self.max_batch_size)
            changes["max_batch_size"] = 1
        return dataclasses.replace(self, **changes)


def from_mapping(values: Mapping[str, Any]) -> EngineConfig:
    """A configuration from flag names or field names (dashes or underscores). Unknown names are refused."""
    names = {f.name: f for f in dataclasses.fields(EngineConfig)}
    fields: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        name = "max_batch_size" if name == "max_num_seqs" else name
        if name not in names:
            raise ConfigError(f"unknown setting {key!r}{_nearest(name, list(names))}")
        fields[name] = value
    if "model" not in fields:
        raise ConfigError("no model given: set `model` to a checkpoint folder or a hub id")
    if "faults" in fields:
        fields["faults"] = tuple(f if isinstance(f, FaultSpec) else FaultSpec(**f) for f in fields["faults"])
    return EngineConfig(**fields)


def from_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, as a mapping to merge with flags."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings to values, not a {type(values).__name__}")
    return values


def warn_unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """One message for each METRALE_* variable that nothing reads, with the nearest name; also logged."""
    variables = os.environ if environment is None else environment
    unknown = [v for v in sorted(variables) if v.startswith("METRALE_") and v not in KNOWN_VARIABLES]
    messages = [f"unknown environment variable {v}{_nearest(v, list(KNOWN_VARIABLES))}" for v in unknown]
    for message in messages:
        log.warning("%s", message)
    return messages


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"


def _check(config: EngineConfig) -> None:
    for name in ("ep_size", "max_batch_size", "max_num_batched_tokens", "block_size", "max_queue_len"):
        _at_least_one(name, getattr(config, name))
    for name in ("max_model_len", "kv_cache_memory"):
        if getattr(config, name) is not None:
            _at_least_one(name, getattr(config, name))
    for name in ("start_timeout_s", "placement_timeout_s", "step_timeout_s", "idle_ping_s"):
        if not _is_number(getattr(config, name)) or getattr(config, name) <= 0:
            raise ConfigError(f"{name} is {getattr(config, name)!r}; it must be a number of seconds above 0")
    for name in ("num_cpus_per_rank", "num_gpus_per_rank"):
        value = getattr(config, name)
        if value is not None and (not _is_number(value) or value <= 0):
            raise ConfigError(f"{name} is {value!r}; it must be a number above 0; below 1 means a shared one")
    if config.max_num_batched_tokens < config.max_batch_size:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, less than max_batch_size "
            f"{config.max_batch_size}: a step needs one token per sequence. Raise the first or lower the second."
        )
    _one_of("dtype", config.dtype, DTYPES)
    _one_of("placement", config.placement, PLACEMENTS)
    _one_of("log_level", config.log_level, LOG_LEVELS)
    if not isinstance(config.model, str) or not config.model:
        raise ConfigError(f"model is {config.model!r}; it must be a checkpoint folder or a hub id")
    if config.ep_protocol is not None:
        resolve_version(config.ep_protocol, None)
    if not _is_number(config.watermark) or not 0 <= config.watermark < 1:
        raise ConfigError(f"watermark is {config.watermark!r}; it must be a share of the blocks, from 0 to below 1")
    if isinstance(config.seed, bool) or not isinstance(config.seed, int) or not 0 <= config.seed < 2**64:
        raise ConfigError(f"seed is {config.seed!r}; it must be an integer from 0 to 2**64 - 1")
    if config.device not in ("auto", "cpu", "cuda") and not config.device.startswith("cuda:"):
        raise ConfigError(f"device is {config.device!r}; allowed are auto, cpu and cuda")


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
