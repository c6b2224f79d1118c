# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a service can be told, besides its engines: `ServiceOptions` for all of it, `ModelOptions` for each model.

Rules: names are the flags' names with underscores, the same for the command line, a YAML file and the arguments of a
Ray Serve application. A key may also be in a file or in the environment, and is never shown: a mistake in one is told
by where it stands and its type or length. Unknown names are refused with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from metrale_ray.config import EngineConfig, by_field_name, from_mapping
from metrale_ray.errors import ConfigError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.parsing.names import REASONING_PARSERS, TOOL_PARSERS

ACCESS_LOGGER = "metrale_ray.serve.http"
"""Writes one line for each request."""

API_KEY_VARIABLE = "METRALE_API_KEY"
ADMIN_KEY_VARIABLE = "METRALE_ADMIN_KEY"
MIN_KEY_CHARACTERS = 8
NONE = "none"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """One model: its engine, and how it is served. Raises ConfigError.

    `names`: what clients may call it; its folder or hub id where none is given. `tool_parser`, `reasoning_parser`: how
    its answers are read, None for not at all.
    """

    config: EngineConfig
    names: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ConfigError(f"{name} is {value!r}; allowed are {NONE}, {', '.join(sorted(known))}")
        for name in self.names:
            if not isinstance(name, str) or not name or len(name) > 256:
                raise ConfigError(f"served_model_name is {name!r}; it must be a text of 1 to 256 characters")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ConfigError(f"chat_template is {self.chat_template!r}, which is no file; give the file's path")

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names, its own first."""
        return self.names or (self.config.model,)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """All of a service but its models. Times in seconds. Raises ConfigError.

    `drain_timeout_s`: how long running requests may go on once the service is told to stop. `progress_timeout_s`: how
    long no command may complete while work waits. `open_paths`: paths beside liveness that need no key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    open_paths: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    strict: bool = False
    allow_request_templates: bool = False
    drain_timeout_s: float = 30.0
    progress_timeout_s: float = 90.0
    limits: ServeLimits = field(default_factory=ServeLimits)

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port!r}; it must be 1 to 65535, or 0 for one that is free")
        for name in ("drain_timeout_s", "progress_timeout_s"):
            value = getattr(self, name)
            least = "at least" if name == "drain_timeout_s" else "above"
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and least == "above"):
                raise ConfigError(f"{name} is {value!r}; it must be a number of seconds, {least} 0")
        for name in ("strict", "allow_request_templates"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        for name in ("api_keys", "admin_keys"):
            for number, key in enumerate(getattr(self, name), start=1):
                _check_key(f"key {number} of {name}", key)
        if set(self.api_keys) & set(self.admin_keys):
            raise ConfigError("a key is both an API key and an admin key; choose another one for the admin routes")


MODEL_NAMES = ("served_model_name", "chat_template", "tool_parser", "reasoning_parser")
SERVICE_NAMES = (
    "host",
    "port",
    "api_key",
    "api_key_file",
    "admin_key",
    "admin_key_file",
    "open_path",
    "cors_origin",
    "strict",
    "allow_request_templates",
    "drain_timeout_s",
    "progress_timeout_s",
)
TEXTS = (
    *(
        "model",
        "revision",
        "name",
        "dtype",
        "device",
        "quantization",
        "kernels",
        "attention",
        "attention_backend",
        "ep_protocol",
        "kv_cache_memory",
        "address",
    ),
    *("placement", "log_level", "host", "api_key", "api_key_file", "admin_key", "admin_key_file", "open_path"),
    *("cors_origin", *MODEL_NAMES),
)
"""Options that are texts even where they look like numbers."""
LIMIT_NAMES = tuple(limit.name for limit in dataclasses.fields(ServeLimits))


def model_options(values: Mapping[str, Any]) -> ModelOptions:
    """One model's options out of a mapping that holds nothing else. Raises ConfigError."""
    own, engine = _split(values, MODEL_NAMES)
    return ModelOptions(
        config=from_mapping(engine),
        names=_texts("served_model_name", own.get("served_model_name")),
        chat_template=own.get("chat_template"),
        tool_parser=_or_none(own.get("tool_parser")),
        reasoning_parser=_or_none(own.get("reasoning_parser")),
    )


def service_options(values: Mapping[str, Any], environment: Mapping[str, str]) -> ServiceOptions:
    """A service's options out of a mapping that holds nothing else, and keys of the environment. Raises ConfigError."""
    own, rest = _split(values, SERVICE_NAMES)
    limits, unknown = _split(rest, LIMIT_NAMES)
    if unknown:
        raise ConfigError(_unknown(next(iter(unknown)), (*SERVICE_NAMES, *LIMIT_NAMES)))
    plain = ("host", "port", "strict", "allow_request_templates", "drain_timeout_s", "progress_timeout_s")
    return ServiceOptions(
        **{name: own[name] for name in plain if name in own},
        api_keys=_keys("api_key", own, API_KEY_VARIABLE, environment),
        admin_keys=_keys("admin_key", own, ADMIN_KEY_VARIABLE, environment),
        open_paths=_texts("open_path", own.get("open_path")),
        cors_origins=_texts("cors_origin", own.get("cors_origin")),
        limits=ServeLimits(**limits),
    )


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of flat `values` is for the model (its engine's settings included), and what for the service.

    Raises ConfigError for a name that nobody knows.
    """
    service, rest = _split(values, (*SERVICE_NAMES, *LIMIT_NAMES))
    own, engine = _split(rest, MODEL_NAMES)
    known = [setting.name for setting in dataclasses.fields(EngineConfig)]
    for name in engine:
        if name not in known and name != "max_num_seqs":
            raise ConfigError(_unknown(name, (*known, *MODEL_NAMES, *SERVICE_NAMES, *LIMIT_NAMES)))
    return {**own, **by_field_name(engine)}, service


def with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` as a file would hold them: `serve run` gives every argument as a text. What is no number stays."""
    return {
        name: value if name.replace("-", "_") in TEXTS or not isinstance(value, str) else _as_in_file(value)
        for name, value in values.items()
    }


def _as_in_file(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, int | float) else text


def _split(values: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values under `names`, and the others, by names with underscores."""
    by_name: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in by_name:
            raise ConfigError(f"{name} is given twice, the second time as {key!r}; leave one of the two out")
        by_name[name] = value
    mine = {name: value for name, value in by_name.items() if name in names}
    return mine, {name: value for name, value in by_name.items() if name not in names}


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; see metrale-ray serve --help")


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) and each for each in listed):
        raise ConfigError(f"{name} is {value!r}; it must be a text, or a list of texts")
    return tuple(listed)


def _or_none(value: Any) -> Any:
    return None if value == NONE else value


def _keys(name: str, own: Mapping[str, Any], variable: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that were given, those of the file, and the environment's; each once."""
    given = _given_keys(name, own.get(name))
    file = own.get(f"{name}_file")
    in_file = () if file is None else _keys_in(f"{name}_file", file)
    in_environment = [environment[variable]] if environment.get(variable) else []
    for key in in_environment:
        _check_key(f"the key in {variable}", key)
    return tuple(dict.fromkeys([*given, *in_file, *in_environment]))


def _given_keys(name: str, value: object) -> tuple[str, ...]:
    """One key, or a list of them."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        _check_key(name, value, or_else=", or a list of texts")
        return (str(value),)
    for number, key in enumerate(value, start=1):
        _check_key(f"key {number} of {len(value)} in {name}", key)
    return tuple(value)


def _keys_in(name: str, file: object) -> tuple[str, ...]:
    """One key in each line that is not empty and no comment (#)."""
    if not isinstance(file, str | Path):
        raise ConfigError(f"{name} is of type {type(file).__name__}; it must be the path of a file")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:  # its own text shows what stands there
        raise ConfigError(f"{name} is {str(file)!r}, which is no UTF-8 text; put one key into each line") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name} is {str(file)!r}, which cannot be read: {reason}") from error
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), start=1)}
    keys = {number: line for number, line in lines.items() if line and not line.startswith("#")}
    for number, key in keys.items():
        _check_key(f"the key in line {number} of {name}", key)
    if not keys:
        raise ConfigError(f"{name} is {str(file)!r}, which holds no key; put one into each line")
    return tuple(keys.values())


def _check_key(what: str, key: object, *, or_else: str = "") -> None:
    """Refuse what is no key, without a word of it: something like a key may stand there."""
    if not isinstance(key, str):
        raise ConfigError(
            f"{what} is of type {type(key).__name__}; it must be a text{or_else}; in YAML, put it in quotes"
        )
    if not re.fullmatch(r"[\x21-\x7e]+", key) or len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{what} has {len(key)} characters; a key has at least {MIN_KEY_CHARACTERS}, all of them visible "
            "ASCII. `openssl rand -hex 32` makes a good one"
        )
