# SPDX-License-Identifier: MIT OR Apache-2.0
"""A node's home for commands that a configuration runs there, with programs that only note how they were called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


class Home:
    """A user's home on a node. Programs named in `fake` succeed, and note their arguments in `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir(parents=True)
        self._calls = folder / "calls"
        (folder / ".ray").mkdir()
        (folder / ".ray" / "auth_token").write_text("secret")
        self.fake("programs/python3", "exit 1")  # no test makes a real environment

    def fake(self, path: str, script: str = "") -> None:
        """A program at `path` below the home."""
        program = self.folder / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/bash\necho "$(basename "$0") $*" >> "$HOME/calls"\n{script}\n')
        program.chmod(0o755)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run `command` as Ray's launcher does: in a subshell, after ~/.bashrc."""
        line = f"[ -f ~/.bashrc ] && source ~/.bashrc; export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore && ({command})"
        environment = {"HOME": str(self.folder), "PATH": f"{self.programs}:{os.environ['PATH']}"}
        return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=30)

    def calls(self) -> list[str]:
        """The calls since they were last asked for."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return lines
