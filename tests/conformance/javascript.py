# SPDX-License-Identifier: MIT OR Apache-2.0
"""The same checks in JavaScript, run under Node: see `js/run.mjs`, which writes one line of JSON for each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.conformance.target import Target

FOLDER = Path(__file__).parent / "js"
TIMEOUT_S = 600.0
# Checks that only one of the clients can make: it is about something that the other one does not have.
ONLY_PYTHON = {
    "an_asynchronous_chat_is_the_same",
    "an_asynchronous_completion_is_the_same",
}
ONLY_JAVASCRIPT: set[str] = set()


def missing() -> str | None:
    """Why the checks cannot be run here, or None."""
    if shutil.which("node") is None:
        return "node is not installed"
    if not (FOLDER / "node_modules" / "openai").is_dir():
        return f"openai's package is not there: run `npm install --no-package-lock` in {FOLDER}"
    return None


def names() -> list[str]:
    """The names of the checks."""
    listed: list[str] = json.loads(_node(["--list"]))
    return listed


def run(target: Target) -> dict[str, tuple[str, str]]:
    """What came of each check: "ok", "failed" or "skipped", and why."""
    lines = _node([target.base_url, target.model, ",".join(sorted(target.missing))], target.api_key).splitlines()
    found = [json.loads(line) for line in lines if line]
    return {entry["name"]: (entry["outcome"], entry["why"]) for entry in found}


def _node(arguments: list[str], api_key: str | None = None) -> str:
    environment = {**os.environ, "OPENAI_API_KEY": api_key or "none"}
    done = subprocess.run(
        ["node", "run.mjs", *arguments],
        cwd=FOLDER,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"node ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
