# SPDX-License-Identifier: MIT OR Apache-2.0
"""A batch as a Ray job: requests of a file, answered into another file by an engine that is there for this job alone.

    ray job submit --address http://HEAD:8265 --working-dir examples -- \\
        python driver.py --model /models/model --ep-size 2 --input prompts.jsonl --output /data/answers.jsonl

The job runs on the head. INPUT is in OpenAI's batch format, one request in each line; it may lie beside this file, as a
job takes that folder with it. OUTPUT is one answer in each line, as they finish; in a job it is a whole path, for a
job's own folder goes with it. Whatever ends the job early, the same command goes on from there. Progress is a line now
and then, in the job's log (`ray job logs`).

Without a job it is the same: `python examples/driver.py ...` joins the Ray at RAY_ADDRESS, or starts one of its own.
Exit code 0; 1 where a request has an error in its line; 2 to 4 as `metrale-ray batch`, 143 where the job was stopped.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from metrale_ray import LLM
from metrale_ray.batch import BatchOptions, run_batch
from metrale_ray.batch.engine import BatchEngine
from metrale_ray.errors import MetraleError, UserError
from metrale_ray.termination import INTERRUPTED, TERMINATED, interrupt_at_sigterm, was_terminated

ALL_WELL, REQUESTS_FAILED, ENGINE_FAILED = 0, 1, 4
JOBS_FOLDERS = "runtime_resources"  # where Ray unpacks what a job brings, and from where it goes when the job ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer the file, and give the exit code."""
    flags = parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    interrupt_at_sigterm()  # `ray job stop` sends it: the engine ends in order
    try:
        return run(flags)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from there")
        return TERMINATED if was_terminated() else INTERRUPTED
    except MetraleError as error:
        say(f"error: {error}")
        return error.exit_code if error.exit_code != MetraleError.exit_code else ENGINE_FAILED


def parser() -> argparse.ArgumentParser:
    """The flags of this script."""
    flags = argparse.ArgumentParser(description="Answer a file of requests on a Ray cluster.", allow_abbrev=False)
    flags.add_argument("--model", required=True, help="checkpoint: the same folder on every node, or a hub id")
    flags.add_argument("--ep-size", type=int, default=1, help="ranks that the experts are spread over")
    flags.add_argument("--input", required=True, type=Path, help="requests, in OpenAI's batch format")
    flags.add_argument("--output", required=True, type=Path, help="where the answers go")
    flags.add_argument("--served-model-name", default=(), help="what the requests call the model, if not MODEL")
    flags.add_argument("--placement", default="PACK", help="SPREAD: ranks over the nodes, as far as there are some")
    flags.add_argument("--num-cpus-per-rank", type=float, help="cores of each rank; the node's, shared, if left out")
    flags.add_argument("--num-gpus-per-rank", type=float, help="GPUs of each rank; 1 on GPUs if left out")
    return flags


def run(flags: argparse.Namespace) -> int:
    """Both files are looked at before an engine is started, and none is where everything is answered already."""
    check_stays(flags.output)
    options = BatchOptions(served_model_name=flags.served_model_name)
    summary = run_batch(lambda: open_engine(flags), flags.input, flags.output, options)
    say(f"{flags.output}: {summary}")
    return REQUESTS_FAILED if summary.num_errors else ALL_WELL


def open_engine(flags: argparse.Namespace) -> AbstractContextManager[BatchEngine]:
    """An engine over the nodes of the Ray that the job runs on. It ends with this script."""
    names = ("placement", "num_cpus_per_rank", "num_gpus_per_rank")
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    say(f"starting {flags.ep_size} ranks of {flags.model}")
    return LLM(flags.model, ep_size=flags.ep_size, **given)


def check_stays(output: Path) -> None:
    """Refuse to write into the job's own folder, where nobody would find it again. Raises UserError."""
    if JOBS_FOLDERS in output.absolute().parts:
        raise UserError(
            f"--output is {str(output)!r}, which goes with this job; give a whole path such as /data/{output.name}"
        )


def say(line: str) -> None:
    """One line of the job's log."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
