# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Finding`: one thing that was judged, and what to do about it.

Rules. `problem`: an engine would not start, or not run right; `warning`: it would, worse than it could.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was judged. `node` is None for what concerns all, `advice` (what to do) when all is well."""

    level: Level
    subject: str
    text: str
    advice: str | None = None
    node: str | None = None


def has_problem(findings: Iterable[Finding]) -> bool:
    """Whether any of them is a problem."""
    return any(finding.level == "problem" for finding in findings)


def as_mapping(finding: Finding) -> Mapping[str, Any]:
    """A finding for JSON."""
    return dataclasses.asdict(finding)
