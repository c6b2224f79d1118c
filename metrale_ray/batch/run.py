# SPDX-License-Identifier: MIT OR Apache-2.0
"""`run_batch`: a whole batch in one call, for Python programs."""

from __future__ import annotations

from pathlib import Path

from metrale_ray.batch.batch import open_batch
from metrale_ray.batch.engine import BatchEngine, OpenEngine
from metrale_ray.batch.options import BatchOptions
from metrale_ray.batch.tally import BatchSummary


def run_batch(
    engine: BatchEngine | OpenEngine,
    input_path: str | Path,
    output_path: str | Path,
    options: BatchOptions | None = None,
) -> BatchSummary:
    """Answer the requests of INPUT, in OpenAI's batch format, into OUTPUT. After an interruption the same call goes on.

    `engine`: an `LLM`, or what opens one (`lambda: LLM("path/to/checkpoint", ep_size=2)`), which is called only once
    both files are found right and there is something to ask. Progress goes to standard error. Raises UserError for
    files that cannot be used, EngineDead, what `engine` raises, and KeyboardInterrupt; what was answered until then is
    kept.
    """
    with open_batch(Path(input_path), Path(output_path), options or BatchOptions()) as batch:
        if not batch.needs_engine:
            return batch.run(None)
        if not callable(engine):
            return batch.run(engine)
        with engine() as opened:
            return batch.run(opened)
