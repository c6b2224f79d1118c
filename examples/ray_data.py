# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers for a whole dataset: Ray Data reads the prompts, one engine answers them, Ray Data writes the answers.

    echo '{"prompt": "The capital of France is"}' > questions.jsonl
    python examples/ray_data.py questions.jsonl answers --model path/to/checkpoint --ep-size 2 --num-cpus-per-rank 0.5
    python examples/ray_data.py questions.jsonl answers --engine mine     # one that runs already, such as a service's

INPUT: a file or a folder of JSON lines (.jsonl, .json) or Parquet, of which one column holds the prompts. OUTPUT: a
folder that is written as Parquet, or as JSON lines with --format json. It must not be there yet.

--num-cpus-per-rank: without it the ranks share all cores, and none is left to Ray Data, which then cannot read. 0.5
fits 2 ranks on a machine of 2 cores; with 8 cores and 2 ranks, 3 is better.

Needs: pip install 'metrale-ray[data]'. Ray is the one at RAY_ADDRESS, or one that is started here; in a Ray job, the
job's own. Exit codes: 0; 1 where a row could not be answered, whose reason is in the column `error`; 2 where a flag or
the input is wrong; 3 where the engine did not start, or something could not be read or written; 4 where it has ended.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import ray
import ray.data
from ray.exceptions import RayError

from metrale_ray import LLM, AttachedLLM, SamplingParams, attach, errors
from metrale_ray.errors import EngineDead, MetraleError, UserError
from metrale_ray.ray_data import generate

ROWS_FAILED = 1
READ_ADVICE = (
    "Each line of JSON must be one object, all with the same columns of the same types, such as "
    '{"prompt": "The capital of France is"}; Parquet must be whole.'
)
NODES_ADVICE = "Every node of the Ray must have it at this path, as on a shared file system, with the rights to use it."


class DatasetError(MetraleError):
    """Something could not be read, answered or written, through no fault of what was asked."""

    code = "dataset_error"
    exit_code = 3


def main() -> int:
    flags = parser().parse_args()
    keep_tracebacks_in_files()
    try:
        return run(flags)
    except MetraleError as error:
        print(f"error: {str(error).replace('prompt_column', '--column')}", file=sys.stderr)
        return error.exit_code


def keep_tracebacks_in_files() -> None:
    """Ray Data's errors stay in its log files; the terminal gets the one line that says what to do."""
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.addFilter(lambda record: record.levelno < logging.ERROR)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description="Answer the prompts of a dataset.")
    flags.add_argument("input", help="JSON lines or Parquet: a file or a folder")
    flags.add_argument("output", help="a folder that is not there yet")
    source = flags.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="start an engine with this checkpoint")
    source.add_argument("--engine", help="use the engine with this name, which runs on the same Ray")
    flags.add_argument("--ep-size", type=int, default=1, help="ranks of the engine that is started")
    # Ray Data's own tasks need a CPU beside the ranks.
    flags.add_argument("--num-cpus-per-rank", type=float, help="cores of each rank; leave at least one to Ray Data")
    flags.add_argument("--column", default="prompt", help="the column with the prompts")
    flags.add_argument("--chat", action="store_true", help="they are questions, or lists of messages")
    flags.add_argument("--max-tokens", type=int, default=64)
    flags.add_argument("--temperature", type=float, default=0.0)
    flags.add_argument("--format", choices=("parquet", "json"), default="parquet")
    return flags


def run(flags: argparse.Namespace) -> int:
    """Read, answer, write; the number of rows is told at the end."""
    output = Path(flags.output).absolute()
    if output.exists():
        raise UserError(f"the output {output} is there already; give a folder that is not, or remove it")
    kind_of(Path(flags.input).absolute())  # a mistake is told before an engine starts
    with open_engine(flags) as llm:
        params = SamplingParams(max_tokens=flags.max_tokens, temperature=flags.temperature)
        with told(f"the input {flags.input} could not be read"):
            answers = generate(read(flags.input), llm, prompt_column=flags.column, params=params, chat=flags.chat)
            answers = answers.materialize()  # each row is answered once, whatever is done with it
        with told(f"the output {output} could not be written"):
            if flags.format == "json":
                answers.write_json(str(output))
            else:
                answers.write_parquet(str(output))
        # Where the engine's Ray was started for it, it ends with it, and the dataset too.
        num_rows, num_failed = answers.count(), sum(row["error"] is not None for row in answers.iter_rows())
    print(f"{num_rows} rows answered into {output}, {num_failed} of them with an error")
    return ROWS_FAILED if num_failed else 0


def open_engine(flags: argparse.Namespace) -> LLM | AttachedLLM:
    """An engine of our own, which ends with this script, or one that runs and stays."""
    if flags.engine is not None:
        return attach(flags.engine)
    settings = {} if flags.num_cpus_per_rank is None else {"num_cpus_per_rank": flags.num_cpus_per_rank}
    return LLM(flags.model, ep_size=flags.ep_size, **settings)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Around what Ray Data executes, here and on other nodes: each of its failures becomes an error of one line."""
    try:
        yield
    except (RayError, OSError, pyarrow.ArrowException) as error:
        raise error_of(error, what) from error


def error_of(error: Exception, what: str) -> MetraleError:
    """What a failure of Ray Data comes from, by name. Of what the map actors raise, Ray keeps the text alone."""
    own = re.search(r"^metrale_ray\.errors\.(\w+): (.+)$", str(error), re.MULTILINE)
    if own:
        kind = getattr(errors, own[1])
        return next((base for base in (UserError, EngineDead) if issubclass(kind, base)), DatasetError)(own[2])
    cause = getattr(error, "cause", None) or error
    first_line = next(iter(str(cause).splitlines()), "")
    message = f"{what}: {type(cause).__name__}: {first_line}".rstrip(": ")
    if isinstance(cause, OSError):
        return DatasetError(f"{message}. {NODES_ADVICE}")
    if isinstance(cause, (ValueError, AssertionError, pyarrow.ArrowException)):  # the second: JSON that is no object
        return UserError(f"{message}. {READ_ADVICE}")
    return DatasetError(f"{message}. Ray's log files have the rest; `ray status` says what the Ray has left.")


def read(source: str) -> ray.data.Dataset:
    """The dataset. It is read when it is needed, by tasks on any node, so `source` must be the same path on all."""
    path = Path(source).absolute()
    if kind_of(path) == "json":
        return ray.data.read_json(str(path), file_extensions=["jsonl", "json"])
    return ray.data.read_parquet(str(path))


def kind_of(path: Path) -> str:
    """json or parquet, by the names of the files. Raises UserError for others, for both, and for no file."""
    if not path.exists():
        raise UserError(f"the input {path} is not there; give a file or a folder of JSON lines or Parquet")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    kinds = {file.suffix for file in files if not file.name.startswith(("_", "."))}  # such as Spark's _SUCCESS
    if kinds and kinds <= {".jsonl", ".json"}:
        return "json"
    if kinds == {".parquet"}:
        return "parquet"
    raise UserError(f"the input {path} has files of {sorted(kinds) or 'no kind'}; give all .jsonl, or all .parquet")


if __name__ == "__main__":
    sys.exit(main())
