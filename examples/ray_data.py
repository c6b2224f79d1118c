# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers for a whole dataset: Ray Data reads the prompts, one engine answers them, Ray Data writes the answers.

    python examples/ray_data.py prompts.jsonl answers --model path/to/checkpoint --ep-size 2
    python examples/ray_data.py prompts.jsonl answers --engine mine     # one that runs already, such as a service's

INPUT: a file or a folder of JSON lines (.jsonl, .json) or Parquet, of which one column holds the prompts. OUTPUT: a
folder that is written as Parquet, or as JSON lines with --format json. It must not be there yet.

Needs: pip install 'metrale-ray[data]'. Ray is the one at RAY_ADDRESS, or one that is started here; in a Ray job, the
job's own. A row that could not be answered has its reason in the column `error`; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ray
import ray.data

from metrale_ray import LLM, AttachedLLM, SamplingParams, attach
from metrale_ray.errors import MetraleError, UserError
from metrale_ray.ray_data import generate

ROWS_FAILED = 1


def main() -> int:
    flags = parser().parse_args()
    try:
        return run(flags)
    except MetraleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


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
    with open_engine(flags) as llm:
        params = SamplingParams(max_tokens=flags.max_tokens, temperature=flags.temperature)
        answers = generate(read(flags.input), llm, prompt_column=flags.column, params=params, chat=flags.chat)
        answers = answers.materialize()  # each row is answered once, whatever is done with it
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


def read(source: str) -> ray.data.Dataset:
    """The dataset. It is read when it is needed, by tasks on any node, so `source` must be the same path on all."""
    path = Path(source).absolute()
    if not path.exists():
        raise UserError(f"the input {path} is not there")
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    kinds = {file.suffix for file in files if not file.name.startswith(("_", "."))}  # such as Spark's _SUCCESS
    if kinds and kinds <= {".jsonl", ".json"}:
        return ray.data.read_json(str(path), file_extensions=["jsonl", "json"])
    if kinds == {".parquet"}:
        return ray.data.read_parquet(str(path))
    raise UserError(f"the input {path} has files of {sorted(kinds) or 'no kind'}; give all .jsonl, or all .parquet")


if __name__ == "__main__":
    sys.exit(main())
