# SPDX-License-Identifier: MIT OR Apache-2.0
"""From nothing to the first token: a new Python that starts a local Ray and an engine, and what the time goes to.

    python -m bench.start [--model FOLDER] [--reps 3] [--ranks 1,2] [--prompt 16] [--set quantization=int8]

The checkpoint's files are in the page cache. Each repeat is a process of its own, timed from before it is started; the
phases are told by the driver as they end. Loading is from when the head says that all ranks have met until it is ready,
and includes the KV cache; polls make it up to 0.1 s too long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from bench.load import ROOT_VARIABLE
from bench.model import ensure_model
from bench.prompts import prompts
from bench.repeats import repeat, spread
from bench.results import write_results

AIM_S = 8.0
ROOT = Path(__file__).resolve().parents[1]
PHASES = {
    "imported": "Python and imports",
    "ray": "local Ray",
    "placed": "placement",
    "actors": "actors",
    "met": "handshake and meeting",
    "ready": "loading",
    "opened": "driver's session",
    "first": "first token",
}


def main() -> None:
    args = _arguments()
    model = ensure_model(args.model)
    if args.case:
        print(json.dumps(_start(args, model, args.case)))
        return
    for path in model.glob("*.safetensors"):
        _warm(path)
    print(f"Prompt of {args.prompt} tokens; medians of {args.reps}; the aim is under {AIM_S:g} s.\n")
    print("| ranks | all, s | " + " | ".join(PHASES.values()) + " |\n|" + "---|" * (len(PHASES) + 2))
    results = {}
    for ranks in args.ranks:
        measured = [one.value for one in repeat(lambda ranks=ranks: _in_process(args, model, ranks), args.reps)]
        whole = spread([each["first"] for each in measured])
        cells = [statistics.median(_parts(each)[name] for each in measured) for name in PHASES]
        print(f"| {ranks} | {whole.text(2)} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
        results[ranks] = whole.median
    write_results("start", results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--ranks", type=lambda text: [int(number) for number in text.split(",")], default=[1, 2])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="one more setting")
    parser.add_argument("--case", type=int, metavar="RANKS", help=argparse.SUPPRESS)
    parser.add_argument("--began-s", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(2**24):
            pass


def _parts(moments: dict[str, float]) -> dict[str, float]:
    """Seconds of each phase, from the moments at which they ended."""
    ends = [0.0, *(moments[name] for name in PHASES)]
    return {name: ends[index + 1] - ends[index] for index, name in enumerate(PHASES)}


def _in_process(args: argparse.Namespace, model: Path, ranks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.start", "--model", str(model), "--prompt", str(args.prompt)]
    command += ["--case", str(ranks), *(f"--set={each}" for each in args.set)]
    environment = {ROOT_VARIABLE: str(os.getpid()), **os.environ}
    environment.pop("OMP_NUM_THREADS", None)
    command += ["--began-s", str(time.monotonic())]  # one clock for all processes of a machine
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _start(args: argparse.Namespace, model: Path, ranks: int) -> dict[str, float]:
    """Seconds from the beginning to the end of each phase."""
    from metrale_ray import llm as module

    moments: dict[str, float] = {}

    def note(name: str) -> None:
        moments.setdefault(name, time.monotonic() - args.began_s)

    note("imported")
    module.Cluster = _timed_cluster(module.Cluster, note)  # where the driver finds it
    settings = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in args.set)}
    with module.LLM(str(model), ep_size=ranks, dtype="bfloat16", device="cpu", **settings) as llm:
        from metrale_ray import SamplingParams

        note("opened")
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        for _ in llm.stream(prompts(1, args.prompt)[0], params):
            note("first")
    return moments


def _timed_cluster(kind: Any, note: Any) -> Any:
    """The same cluster, which tells when Ray was there, the ranks were placed, their actors were, and they had met."""

    class TimedCluster(kind):  # type: ignore[misc]
        def _claim_name(self) -> None:
            note("ray")
            super()._claim_name()

        def _start_actors(self) -> None:
            note("placed")
            super()._start_actors()
            note("actors")

        def _wait_ready(self, on_state: Any) -> None:
            def tell(state: Any) -> None:
                if state.phase != "starting":
                    note("met")
                on_state(state)

            super()._wait_ready(tell)
            note("ready")

    return TimedCluster


if __name__ == "__main__":
    main()
