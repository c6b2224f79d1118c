# SPDX-License-Identifier: MIT OR Apache-2.0
"""A compose file as Docker Compose reads it: variables put in, then the YAML with its merges.

As much of the Compose Specification's interpolation as compose.yaml uses: `${NAME:-default}`, `${NAME:?message}`,
`${NAME}` and `$$`. Anything else with a `$` is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Z][A-Z0-9_]*)(?:(:-|:\?)([^}]*))?\}|)")


class MissingVariable(Exception):
    """A variable that has to be set is not; the message is the file's own."""


def load(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """What the file means with these variables. Numbers that came from variables are texts, as in Docker Compose."""
    read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    interpolated: dict[str, Any] = _interpolated(read, variables)
    return interpolated


def variables_of(path: Path) -> set[str]:
    """The names of the variables that the file uses."""
    return {match[2] for match in VARIABLE.finditer(_without_comments(path)) if match[2]}


def _without_comments(path: Path) -> str:
    return re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _interpolated(each, variables) for name, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(each, variables) for each in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda match: _put_in(match, variables), value)
    return value


def _put_in(match: re.Match[str], variables: Mapping[str, str]) -> str:
    dollar, name, form, rest = match.groups()
    if dollar:
        return "$"
    if not name:
        raise ValueError(f"a $ that begins no variable: {match.string[match.start() : match.start() + 20]!r}")
    value = variables.get(name, "")
    if value or form is None:
        return value
    if form == ":?":
        raise MissingVariable(f"{name}: {rest}")
    return str(rest)
