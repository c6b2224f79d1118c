# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray doctor`: this machine, or every node of a Ray cluster, with what to do about what was found.

Rules. Exit code 0 without a problem, 1 with one. Without an address no Ray is used and none is started.

The JSON's keys: `ok`, `address` (null: only this machine), `nodes` (each with the fields of `doctor.facts.NodeFacts`),
`findings` (each `level` ("ok", "warning" or "problem"), `subject`, `node` (null: all), `text`, `advice`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from metrale_ray.cli_output import console, write_object

if TYPE_CHECKING:
    from metrale_ray.doctor.facts import ClusterFacts
    from metrale_ray.doctor.finding import Finding

NO_PROBLEM, PROBLEM = 0, 1
# Importing torch on a cold, busy node takes tens of seconds.
NODE_TIMEOUT_S = 60.0
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
THIS_MACHINE = "this machine"
STARTS_ITS_OWN = "local"  # the address with which an engine starts a Ray of its own


def doctor(
    address: str | None, model: str | None, revision: str | None, answers: TextIO, *, timeout_s: float, as_json: bool
) -> int:
    """Examine, judge, write, and give the exit code."""
    from metrale_ray.doctor.cluster_rules import judge
    from metrale_ray.doctor.finding import has_problem

    facts = _examine(None if address == STARTS_ITS_OWN else address, model, revision, timeout_s)
    findings = judge(facts)
    if as_json:
        _write_json(answers, facts, findings)
    else:
        _write_table(answers, findings)
    return PROBLEM if has_problem(findings) else NO_PROBLEM


def _examine(address: str | None, model: str | None, revision: str | None, timeout_s: float) -> ClusterFacts:
    if address is None:
        from metrale_ray.doctor.collect import collect
        from metrale_ray.doctor.facts import ClusterFacts, NodeFacts

        return ClusterFacts((NodeFacts.read(THIS_MACHINE, collect(model, revision)),), model=model)
    from metrale_ray.doctor.nodes import examine

    return examine(address, model, revision, timeout_s)


def _write_json(answers: TextIO, facts: ClusterFacts, findings: Sequence[Finding]) -> None:
    from metrale_ray.doctor.finding import as_mapping, has_problem

    write_object(
        answers,
        {
            "ok": not has_problem(findings),
            "address": facts.address,
            "nodes": [dataclasses.asdict(node) for node in facts.nodes],
            "findings": [as_mapping(finding) for finding in findings],
        },
    )


def _write_table(answers: TextIO, findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        text = Text(finding.text)
        if finding.advice is not None:
            text.append(f"\nto do: {finding.advice}", style="bold")
        level = Text(finding.level, style=STYLES[finding.level])
        table.add_row(level, Text(finding.node or "all"), Text(finding.subject), text)
    console(answers).print(table)
    answers.flush()
