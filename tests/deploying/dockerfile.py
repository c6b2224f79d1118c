# SPDX-License-Identifier: MIT OR Apache-2.0
"""A Dockerfile as its instructions, and what .dockerignore leaves of a folder: as much as the tests need of both."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `stage`: the number of its FROM, the first 0, and -1 before it."""

    stage: int
    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """What follows its name: the list of the exec form, or the words, without the flags before them."""
        if self.rest.startswith("["):
            found: list[str] = json.loads(self.rest)
            return found
        return [word for word in self.rest.split() if not word.startswith("--")]

    @property
    def flags(self) -> dict[str, str]:
        """Its flags, such as `from` of `COPY --from=build`."""
        return dict(re.findall(r"--([a-z-]+)=(\S+)", self.rest))


def instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile's `text`, each in one line, without comments."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: list[Instruction] = []
    stage = -1
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            stage += name == "FROM"
            found.append(Instruction(stage, name, re.sub(r"\s+", " ", rest.strip())))
    return found


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether Docker leaves `path` (with slashes, below the context) out. Of several patterns the last one decides.

    A pattern also stands for all that is below what it matches; `!` takes back (docs.docker.com, .dockerignore files).
    """
    parts = path.split("/")
    above = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    ignored = False
    for pattern in patterns:
        expression = _expression(pattern.removeprefix("!"))
        if any(expression.fullmatch(each) for each in above):
            ignored = not pattern.startswith("!")
    return ignored


def ignore_patterns(text: str) -> list[str]:
    """The patterns in a .dockerignore's `text`."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _expression(pattern: str) -> re.Pattern[str]:
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]*\]|.", pattern)
    return re.compile("".join(parts.get(each, each if each.startswith("[") else re.escape(each)) for each in tokens))
