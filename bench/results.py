# SPDX-License-Identifier: MIT OR Apache-2.0
"""Figures that one section of the report leaves for a later one: a JSON file each, in a folder named by a variable.

A section that runs alone leaves none, and finds none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "BENCH_RESULTS"


def write_results(section: str, results: Any) -> None:
    """Leave the figures of `section`, if they are wanted."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        (Path(folder) / f"{section}.json").write_text(json.dumps(results, indent=1))


def read_results(section: str) -> Any:
    """What `section` left in this run; None where it did not run."""
    folder = os.environ.get(FOLDER_VARIABLE)
    path = Path(folder) / f"{section}.json" if folder else None
    return json.loads(path.read_text()) if path is not None and path.exists() else None
