# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine's settings: frozen, validated once, the same for every rank.

Rules: a field that is None is resolved once, on the side that can know it, and the resolved value is given to every
rank; a node's own environment never decides anything. Only this file and `cli` read the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml

from metrale_ray.errors import ConfigError
from metrale_ray.protocol.limits import MAX_ROWS, MAX_TOKENS
from metrale_ray.protocol.versions import ENV_VAR, ProtocolVersion, resolve_version, worker_default_version

log = logging.getLogger(__name__)

Phase = Literal["validation", "before", "inside", "after", "reply"]
PHASES: tuple[Phase, ...] = ("validation", "before", "inside", "after", "reply")
DAMAGES = ("diverge", "flip_token", "flip_block", "flip_length", "flip_weight", "flip_expert", "flip_kv")
FAULT_KINDS = ("fail", "poison", "leave", "kill", "stop", "slow", *DAMAGES)
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "replicated", "tensor")
ATTENTION_BACKENDS = ("auto", "native", "sdpa", "flash")
KERNELS = ("auto", "native", "torch")
QUANTIZATIONS = ("none", "int8")
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Bytes in each unit: of 1000 as the disk's makers count, of 1024 with an i.
SIZE_UNITS = dict(
    zip(
        ("", "b", "kb", "mb", "gb", "tb", "kib", "mib", "gib", "tib"),
        (1, 1, 10**3, 10**6, 10**9, 10**12, 2**10, 2**20, 2**30, 2**40),
        strict=True,
    )
)
SIZES = ("kv_cache_memory", "journal_max_size")  # may be texts such as "2GiB"
MIN_JOURNAL_BYTES = 2**20  # below this not even the start of a life with long prompts has room
QUOTED = re.compile(r"'([^']*)'")
NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable
JOURNAL_VAR = "METRALE_JOURNAL"
THREADS_VAR = "OMP_NUM_THREADS"  # every library's that computes in threads
KNOWN_VARIABLES = (
    ENV_VAR,
    JOURNAL_VAR,
    "METRALE_CACHE_DIR",
    "METRALE_COLLECTIVES",
    "METRALE_LOG_LEVEL",
    "METRALE_API_KEY",
    "METRALE_ADMIN_KEY",
)


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One fault to raise on purpose, for tests; set in the configuration and reachable in no other way.

    It fires on `rank`, at `phase`, in the `layer`-th reduction of a step (phases before, inside and after only).
    Keyed by sequence (`first_token`: the sequence whose token at position 0 this is) it fires at each run of that
    sequence, from command number `command` on if that is given too; keyed by `command` alone (the number in the epoch)
    it fires once. `cmd` narrows it to one command name; a free counts as a run only when it is named. `kind`: "fail"
    raises, "poison" raises SlotPoisoned for the sequence's slot, "leave" raises Desync, "kill" ends the process, "stop"
    stops it (SIGSTOP), "slow" holds it up for `seconds`, "diverge" corrupts the rank's digest. `blame` says whether the
    error names the slot.

    The "flip_" kinds damage the rank's memory once, without a word: as soon as the command is staged and before it
    runs, whatever the phase. "flip_token", "flip_block" and "flip_length" are for one row of the command, as staged
    here; "flip_kv" for a cached value of a sequence in it that has some. "flip_weight" and "flip_expert" are for a
    weight of `tensor` (the parameter's name in the shard plan; None: the first that is on all ranks, or that has
    experts). "flip_weight" and "flip_kv" are for a high bit of the exponent: the highest, or `bit` places below it.
    """

    rank: int
    phase: Phase
    kind: Literal[
        "fail",
        "poison",
        "leave",
        "kill",
        "stop",
        "slow",
        "diverge",
        "flip_token",
        "flip_block",
        "flip_length",
        "flip_weight",
        "flip_expert",
        "flip_kv",
    ] = "fail"
    layer: int = 0
    first_token: int | None = None
    command: int | None = None
    cmd: str | None = None
    blame: bool = False
    message: str = "injected fault"
    seconds: float = 0.0
    tensor: str | None = None
    bit: int = 0

    def __post_init__(self) -> None:
        _one_of("the phase of a fault", self.phase, PHASES)
        _one_of("the kind of a fault", self.kind, FAULT_KINDS)
        for name in ("rank", "layer", "first_token", "command"):
            if getattr(self, name) is not None or name in ("rank", "layer"):
                _at_least(f"the {name} of a fault", getattr(self, name), 0)
        if type(self.bit) is not int or self.bit not in (0, 1):
            raise ConfigError(f"the bit of a fault is {self.bit!r}; it must be 0 or 1")
        if self.tensor is not None and self.kind not in ("flip_weight", "flip_expert"):
            raise ConfigError(f"a fault of kind {self.kind!r} is for no tensor; leave out tensor {self.tensor!r}")
        if not _is_number(self.seconds) or not 0 <= self.seconds <= 3600:
            raise ConfigError(f"the seconds of a fault are {self.seconds!r}; they must be a number from 0 to 3600")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine can be told. Names are the flags' names with underscores.

    Units: `kv_cache_memory` in bytes per rank, `journal_max_size` in bytes; `*_s` in seconds. None means: chosen at
    start, see docs. `name` is the engine's on a Ray that others use too: one engine of a name runs at a time.
    `agreement_interval`: every so many commands the ranks compare what they computed; 0: never. `journal` is a folder
    on the head's node. `pin`: each CPU rank's threads are kept on CPUs of its own. `attention`: all of it on every rank
    (replicated), or its heads shared out, and dense layers, embedding and output head as well (tensor).
    """

    model: str
    revision: str | None = None
    name: str | None = None
    ep_size: int = 1
    max_batch_size: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "none"
    kernels: str = "auto"
    attention: str = "auto"
    attention_backend: str = "auto"
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
    pin: bool = True
    log_level: str = "warning"
    start_timeout_s: float = 600.0
    placement_timeout_s: float = 25.0
    step_timeout_s: float = 60.0
    idle_ping_s: float = 2.0
    agreement_interval: int = 16
    scrub: bool = False
    journal: str | None = None
    journal_redact: bool = False
    journal_max_size: int = 2**30
    journal_max_age_s: float = 7 * 86_400.0
    faults: tuple[FaultSpec, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def protocol_version(self) -> ProtocolVersion:
        """The protocol version of `ep_protocol`; v2 where nothing was resolved."""
        return resolve_version(self.ep_protocol, None)

    @property
    def threads_per_rank(self) -> int:
        """Threads that a CPU rank computes with: its whole cores, at least one; equal on all ranks."""
        return max(1, int(self.num_cpus_per_rank or 1))

    def worker_version(self, environment: Mapping[str, str] | None = None) -> ProtocolVersion:
        """A worker's version: the head's resolved choice, or, for a worker made by hand, the environment's, else v1."""
        variables = os.environ if environment is None else environment
        if self.ep_protocol is None:
            return worker_default_version(variables.get(ENV_VAR))
        return self.protocol_version

    def resolved(self, environment: Mapping[str, str] | None = None) -> EngineConfig:
        """This configuration with what only this process knows settled: variables, its own folder; and v1's limit."""
        variables = os.environ if environment is None else environment
        version = resolve_version(self.ep_protocol, variables.get(ENV_VAR))
        changes: dict[str, Any] = {
            "model": _absolute_folder(self.model),
            "ep_protocol": version.label,
            "journal": _absolute(self.journal or variables.get(JOURNAL_VAR)),
            "address": self.address or variables.get(RAY_ADDRESS) or None,
        }
        if version is ProtocolVersion.V1 and self.max_batch_size != 1:
            log.warning("protocol v1 has one slot: max_batch_size %d becomes 1", self.max_batch_size)
            changes["max_batch_size"] = 1
        self._warn_of_journal(changes["journal"])
        return dataclasses.replace(self, **changes)

    def _warn_of_journal(self, journal: str | None) -> None:
        """Whoever asks for a redacted journal must have one; and what a variable asks for is easily forgotten."""
        if journal is None and self.journal_redact:
            log.warning("journal_redact does nothing without a journal: give it a folder, or leave it out")
        if journal is not None and self.journal is None and not self.journal_redact:
            log.info("%s: the engine writes a journal, with prompts and answers, into %s", JOURNAL_VAR, journal)


def thread_limit(environment: Mapping[str, str]) -> int | None:
    """The most threads that a rank may compute with, as OMP_NUM_THREADS says; None where it does not.

    Of a list, which is for regions within regions, the first. A text that is no number counts for nothing there either.
    """
    text = environment.get(THREADS_VAR, "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def from_mapping(values: Mapping[str, Any]) -> EngineConfig:
    """A configuration from flag names or field names (dashes or underscores). Unknown names are refused.

    A size may be a text such as "2GiB", a fault a mapping of its fields.
    """
    fields = by_field_name(values)
    if "model" not in fields:
        raise ConfigError("no model given: set `model` (--model) to a checkpoint folder or a hub id")
    for name in SIZES:
        if isinstance(fields.get(name), str):
            fields[name] = parse_size_bytes(fields[name], name)
    if "faults" in fields:
        fields["faults"] = _faults(fields["faults"])
    return EngineConfig(**fields)


def by_field_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under the names of their fields. Raises ConfigError for an unknown or a doubled one."""
    known = [f.name for f in dataclasses.fields(EngineConfig)]
    fields: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        name = "max_batch_size" if name == "max_num_seqs" else name
        if name not in known:
            raise ConfigError(f"unknown setting {key!r}{_nearest(name, known)}")
        if name in fields:
            raise ConfigError(f"{name} is given twice, the second time as {key!r}; leave one of the two out")
        fields[name] = value
    return fields


def parse_size_bytes(text: str, source: str) -> int:
    """The number of bytes that a text such as "1000", "512MiB" or "1.5GB" means. `source` is named in the error."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = match and SIZE_UNITS.get(match[2].lower())
    if not match or unit is None:
        raise ConfigError(f"{source} is {text!r}; it must be bytes, such as 1000000, 512MiB, 2GiB or 1.5GB")
    return int(Fraction(match[1]) * unit)


def from_yaml(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file by field name, to merge with flags. An error names the file."""
    values = read_yaml(path)
    try:
        return by_field_name(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, whatever its names are. An error names the file and shows nothing of its text."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text: {error}") from error
    try:
        values = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is for such as a date that there is not
        raise ConfigError(f"{path} is not valid YAML: {_without_text(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings to values, not a {type(values).__name__}")
    return values


def _without_text(error: yaml.YAMLError | ValueError) -> str:
    """What is wrong and where, without the line it is in and the words it quotes: they may be keys."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    told = QUOTED.sub(_without_word, problem or str(error).partition("\n")[0])
    return told if mark is None else f"{told} (line {mark.line + 1}, column {mark.column + 1})"


def _without_word(quoted: re.Match[str]) -> str:
    is_sign = len(quoted[1]) <= 1 or quoted[1].startswith("<")  # such as ',' and '<stream end>'
    return quoted[0] if is_sign else "what is there"


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where what takes long to make is kept: METRALE_CACHE_DIR, else `metrale_ray` in the user's cache folder."""
    variables = os.environ if environment is None else environment
    given = variables.get("METRALE_CACHE_DIR")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "metrale_ray"


def warn_unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """One message for each METRALE_* variable that nothing reads, with the nearest name; also logged."""
    variables = os.environ if environment is None else environment
    unknown = [v for v in sorted(variables) if v.startswith("METRALE_") and v not in KNOWN_VARIABLES]
    messages = [f"unknown environment variable {v}{_nearest(v, list(KNOWN_VARIABLES))}" for v in unknown]
    for message in messages:
        log.warning("%s", message)
    return messages


def _absolute_folder(model: str) -> str:
    """`model`, made absolute where it is a folder here: a rank's working directory and home may be others."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.isdir(path) else model


def _absolute(folder: str | None) -> str | None:
    """`folder`, made absolute: the head's working directory may be another; None where none is given."""
    return os.path.abspath(os.path.expanduser(folder)) if folder else None


def _faults(values: Any) -> tuple[FaultSpec, ...]:
    if not isinstance(values, list | tuple):
        raise ConfigError(f"faults is {values!r}; it must be a list of faults")
    return tuple(f if isinstance(f, FaultSpec) else _fault(f) for f in values)


def _fault(values: Any) -> FaultSpec:
    try:
        return FaultSpec(**values)
    except TypeError as error:
        names = ", ".join(f.name for f in dataclasses.fields(FaultSpec))
        raise ConfigError(f"a fault is {values!r}; it must be a mapping with a rank and a phase, of {names}") from error


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"


def _check(config: EngineConfig) -> None:
    for name in ("ep_size", "max_batch_size", "max_num_batched_tokens", "block_size", "max_queue_len"):
        _at_least(name, getattr(config, name), 1)
    for name, limit in (("max_batch_size", MAX_ROWS), ("max_num_batched_tokens", MAX_TOKENS)):
        if getattr(config, name) > limit:
            raise ConfigError(f"{name} is {getattr(config, name)}; one command holds up to {limit}. Lower it.")
    for name in ("max_model_len", "kv_cache_memory"):
        if getattr(config, name) is not None:
            _at_least(name, getattr(config, name), 1)
    for name in ("start_timeout_s", "placement_timeout_s", "step_timeout_s", "idle_ping_s", "journal_max_age_s"):
        if not _is_number(getattr(config, name)) or getattr(config, name) <= 0:
            raise ConfigError(f"{name} is {getattr(config, name)!r}; it must be a number of seconds above 0")
    _one_of("dtype", config.dtype, DTYPES)
    _one_of("quantization", config.quantization, QUANTIZATIONS)
    _one_of("kernels", config.kernels, KERNELS)
    _one_of("attention", config.attention, ATTENTIONS)
    _one_of("attention_backend", config.attention_backend, ATTENTION_BACKENDS)
    _one_of("placement", config.placement, PLACEMENTS)
    _one_of("log_level", config.log_level, LOG_LEVELS)
    _check_texts(config)
    _check_shares(config)
    _at_least("agreement_interval", config.agreement_interval, 0)
    _at_least("journal_max_size", config.journal_max_size, MIN_JOURNAL_BYTES)
    for name in ("pin", "scrub", "journal_redact"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name} is {getattr(config, name)!r}; it must be true or false")
    if config.scrub and config.protocol_version is ProtocolVersion.V1:
        raise ConfigError("scrub needs protocol v2, and ep_protocol is v1; leave one of the two out")
    _at_least("seed", config.seed, 0)
    if config.seed >= 2**64:
        raise ConfigError(f"seed is {config.seed!r}; it must be an integer from 0 to 2**64 - 1")
    for fault in config.faults:
        if fault.rank >= config.ep_size:
            raise ConfigError(f"a fault is for rank {fault.rank}; ranks are 0 to {config.ep_size - 1}")


def _check_texts(config: EngineConfig) -> None:
    if not isinstance(config.model, str) or not config.model:
        raise ConfigError(f"model is {config.model!r}; it must be a checkpoint folder or a hub id")
    for name in ("revision", "address", "journal"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{name} is {value!r}; it must be a text that is not empty, or be left out")
    if config.name is not None and (not isinstance(config.name, str) or not NAME_PATTERN.fullmatch(config.name)):
        raise ConfigError(f"name is {config.name!r}; it must be 1 to 64 letters, digits, dots, dashes or underscores")
    if config.ep_protocol is not None:
        resolve_version(config.ep_protocol, None)
    if not isinstance(config.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise ConfigError(f"device is {config.device!r}; allowed are auto, cpu, cuda and cuda:N")


def _check_shares(config: EngineConfig) -> None:
    if not _is_number(config.watermark) or not 0 <= config.watermark < 1:
        raise ConfigError(f"watermark is {config.watermark!r}; it must be a share of the blocks, from 0 to below 1")
    cores = config.num_cpus_per_rank
    if cores is not None and (not _is_number(cores) or cores <= 0):
        raise ConfigError(
            f"num_cpus_per_rank is {cores!r}; it must be a number above 0; 0.5 shares a core of two ranks"
        )
    gpus = config.num_gpus_per_rank
    if gpus is not None and (not _is_number(gpus) or gpus < 0):
        raise ConfigError(f"num_gpus_per_rank is {gpus!r}; it must be a number from 0, such as 1 or 0.5")


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}")


def _is_number(value: object) -> bool:
    """Whether `value` is a finite number: a wait without an end is not a setting."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
