# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decode and prefill: ranks of this engine beside vLLM, llama.cpp and transformers, on one checkpoint in one run.

    python -m bench.decode [--batch 1,8,32] [--prompt 128] [--new 64] [--reps 3]
                           [--peers vllm,vllm-two,llama,llama-q8,transformers] [--ours one,two-tensor,...]

Prefill is batch·prompt tokens over the time until every sequence has its first token; decode is the tokens after that
moment over the time after it. Medians, with the lowest and highest. Each engine runs in a process of its own, one after
another, with all cores; a repeat that other processes disturbed is done again. The bound is in `bound.py`; the read
bandwidth under it is measured before each engine, and its median taken.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import bandwidth
from bench.bandwidth import Bandwidth
from bench.cases.case import MARK
from bench.decode_table import Found, print_tables
from bench.engines import ENGINE_CASES, EngineCase
from bench.load import ROOT_VARIABLE
from bench.model import ensure_model
from bench.results import write_results

ROOT = Path(__file__).resolve().parents[1]
MOST_REPS = 5  # of the bandwidth


def main() -> None:
    args = _arguments()
    args.model = ensure_model(args.model)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and so ends the engine that runs
    chosen = [case for case in ENGINE_CASES if case.name in (args.peers if case.is_peer else args.ours)]
    left_out = {case.name: reason for case in chosen if (reason := case.missing()) is not None}
    found: Found = {}
    bandwidths: list[Bandwidth] = []
    for case in chosen:
        if case.name not in left_out:
            bandwidths.append(bandwidth.measure(MOST_REPS))
            found[case.name], failure = _run(args, case)
            if failure:
                left_out[case.name] = failure
    speed = _median(bandwidths or [bandwidth.measure(MOST_REPS)])
    distinct = {each["batch"]: each["distinct_experts"] for each in found.get("transformers", ())}
    print_tables(args, found, speed, bandwidths, distinct)
    for case in chosen:
        if case.name in left_out:
            print(f"\n{case.label}: left out, {left_out[case.name]}.")
    write_results("decode", {"prompt": args.prompt, "new": args.new, "bandwidth": asdict(speed), "engines": found})
    if any(not case.is_peer and case.missing() is None and case.name in left_out for case in chosen):
        raise SystemExit("an engine of this build failed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of one engine, all batch sizes together")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", type=_names(True), default=_names(True)("all"), help="or all, or none")
    parser.add_argument("--ours", type=_names(False), default=_names(False)("all"), help="or all, or none")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(of_peers: bool) -> Any:
    known = [case.name for case in ENGINE_CASES if case.is_peer is of_peers]

    def read(text: str) -> list[str]:
        names = {"all": known, "none": []}.get(text, text.split(","))
        if unknown := set(names).difference(known):
            raise argparse.ArgumentTypeError(
                f"no such engine: {', '.join(sorted(unknown))}; there are {', '.join(known)}"
            )
        return names

    return read


def _run(args: argparse.Namespace, case: EngineCase) -> tuple[list[dict[str, Any]], str]:
    """What one engine gave, and how it failed, if it did: batch sizes before that count."""
    print(f"{case.label} ...", file=sys.stderr, flush=True)
    command = case.command(sys.executable, args.model)
    command += ["--batch", ",".join(map(str, args.batch)), "--prompt", str(args.prompt), "--new", str(args.new)]
    command += ["--reps", str(args.reps), "--threads", str(args.threads)]
    environment = {**os.environ, ROOT_VARIABLE: str(os.getpid()), **case.environment()}
    environment.pop("OMP_NUM_THREADS", None)  # each engine is told its cores, and makes of them what it does
    found: list[dict[str, Any]] = []
    with _limited(command, environment, args.limit_s) as process:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            if line.startswith(MARK):
                found.append(json.loads(line.removeprefix(MARK)))
                print(f"  batch {found[-1]['batch']}: {found[-1]['decode']} tok/s", file=sys.stderr, flush=True)
        code = process.wait()
    late = f" after its {args.limit_s:g} s" if code == -signal.SIGKILL else ""
    return found, f"it ended with code {code}{late}" if code else ""


@contextmanager
def _limited(command: list[str], environment: dict[str, str], limit_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own, which is killed after `limit_s`, and ended when it is not waited for."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    limit = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _median(all_of: Sequence[Bandwidth]) -> Bandwidth:
    return Bandwidth(*(statistics.median(values) for values in zip(*(asdict(b).values() for b in all_of), strict=True)))


if __name__ == "__main__":
    main()
