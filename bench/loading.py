# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loading: its speed beside a plain read of the same files, and the most memory it takes beside what it leaves.

    python -m bench.loading [--model FOLDER] [--reps 3] [--set quantization=int8]

Files are in the page cache. A plain read copies all of them into memory that is kept, with one thread and nothing else.
A load is what a rank does at its start, without Ray: its share of the files into weights as its kernels want them, and
the KV cache. Each case is a process of its own. Memory is the process's resident memory above what it had before the
load: the most during the load, over the bytes of weights, cache and buffers that the rank holds afterwards.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from bench.load import ROOT_VARIABLE
from bench.model import ensure_model
from bench.repeats import repeat, spread
from bench.results import write_results

CASES = ((0, 1), (0, 2), (1, 2))  # rank, of how many
RATE_AIM, MEMORY_AIM = 0.8, 1.1
READ_BYTES = 2**24
CACHE_BYTES = 2**24  # little: its pages are not there until they are used
CACHE_TOKENS = 4096
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    args = _arguments()
    model = ensure_model(args.model)
    if args.case:
        rank, ranks = args.case
        print(json.dumps(_load(args, model, rank, ranks)))
        return
    files = sorted(model.glob("*.safetensors"))
    _read_all(files)
    plain = spread([one.value for one in repeat(lambda: _read_all(files), args.reps)])
    print(f"A plain read: {plain.text(2)} GB/s.\n")
    print("| rank | GB/s of the files | of a plain read | aim | peak MiB above the start | share MiB | times | aim |")
    print("|---|---|---|---|---|---|---|---|")
    results = []
    for rank, ranks in CASES:
        measured = [
            one.value for one in repeat(lambda rank=rank, ranks=ranks: _in_process(args, model, rank, ranks), args.reps)
        ]
        rate = spread([each["bytes_per_s"] / 1e9 for each in measured])
        peak, share = max(each["peak_bytes"] for each in measured), measured[0]["share_bytes"]
        name = f"{rank} of {ranks}" if ranks > 1 else "the only one"
        ratio, times = f"{rate.median / plain.median:.2f} | {RATE_AIM:g}", f"{peak / share:.2f} | {MEMORY_AIM:g}"
        print(f"| {name} | {rate.text(2)} | {ratio} | {peak >> 20} | {share >> 20} | {times} |")
        results.append({"rank": rank, "ranks": ranks, "rate": rate.median / plain.median, "memory": peak / share})
    write_results("loading", results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="one more setting")
    parser.add_argument("--case", nargs=2, type=int, metavar=("RANK", "RANKS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _read_all(files: list[Path]) -> float:
    """Gigabytes per second."""
    total = sum(path.stat().st_size for path in files)
    began_s = time.perf_counter()
    with mmap.mmap(-1, total) as memory, memoryview(memory) as view:
        place = 0
        for path in files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(view[place : place + READ_BYTES]):
                    place += count
        took_s = time.perf_counter() - began_s
    return total / took_s / 1e9


def _in_process(args: argparse.Namespace, model: Path, rank: int, ranks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.loading", "--model", str(model), "--case", str(rank), str(ranks)]
    command += [f"--set={each}" for each in args.set]
    environment = {ROOT_VARIABLE: str(os.getpid()), **os.environ}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _load(args: argparse.Namespace, model: Path, rank: int, ranks: int) -> dict[str, Any]:
    """One rank's load in this process, with its part of the cores."""
    import torch

    from metrale_ray.config import from_mapping
    from metrale_ray.model.collectives import OneRank
    from metrale_ray.model.ranks import build_replica, open_rank

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    settings = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in args.set)}
    given = {"model": str(model), "ep_size": ranks, "dtype": "bfloat16", "device": "cpu", "max_model_len": CACHE_TOKENS}
    config = from_mapping({**given, "kv_cache_memory": CACHE_BYTES, **settings})
    setup = open_rank(config, rank)
    sizes = (config.max_num_batched_tokens, setup.decoder.hidden_size, setup.dtype)
    collectives = OneRank(rank, ranks, *sizes, "cpu")  # nothing is summed while loading
    _, loaded = build_replica(setup, collectives, None, lambda *told: None)
    num_blocks = CACHE_BYTES // setup.attention.cache.block_bytes(setup.decoder, config.block_size, setup.dtype)
    read_bytes = 0

    def note(done_bytes: int, total_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes = total_bytes

    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began_s = time.perf_counter()
    loaded.load(num_blocks, note)
    took_s = time.perf_counter() - began_s
    peak = _status_bytes("VmHWM") - before
    assert loaded.cache is not None, "it is loaded"
    held = [*loaded.weights.values(), *loaded.cache.layers]
    share = sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())
    return {"bytes_per_s": read_bytes / took_s, "peak_bytes": peak, "share_bytes": share}


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
