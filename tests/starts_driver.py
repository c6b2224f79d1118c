# SPDX-License-Identifier: MIT OR Apache-2.0
"""A script that starts and closes one engine after the other, and says after each what the process holds.

Arguments: the number of starts, then JSON with the model and the engine's settings. Each line is JSON: file
descriptors, threads, resident bytes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path

from metrale_ray import LLM, SamplingParams


def main() -> None:
    given = json.loads(sys.argv[2])
    for _ in range(int(sys.argv[1])):
        with LLM(given["model"], **given["settings"]) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4), progress=False)
        gc.collect()
        print(json.dumps(held()), flush=True)


def held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


if __name__ == "__main__":
    main()
