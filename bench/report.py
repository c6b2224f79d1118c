# SPDX-License-Identifier: MIT OR Apache-2.0
"""All benchmarks in one run, as one page of Markdown on the standard output; how far it is, on the other one.

    make bench ARGS="[--only decode,attention,...] [--batch 1,8,32] [--reps 3] [--peers vllm,llama,...]"

Each section is a script of its own, `python -m bench.NAME`; see README.md in this folder. A section that fails says so
on the page, the others go on, and the run ends with code 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.load import ROOT_VARIABLE
from bench.model import ensure_model
from bench.results import FOLDER_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
Arguments = Callable[[argparse.Namespace], list[str]]


@dataclass(frozen=True)
class Section:
    """One script. `arguments` makes its own of the report's; `is_extra`: it runs only when it is named."""

    name: str
    title: str
    arguments: Arguments = lambda args: []
    is_extra: bool = False


def _model(args: argparse.Namespace) -> list[str]:
    return ["--model", str(args.model)]


def _repeated(args: argparse.Namespace) -> list[str]:
    return [*_model(args), "--reps", str(args.reps)]


def _engines(args: argparse.Namespace) -> list[str]:
    return [*_repeated(args), "--batch", args.batch, "--peers", args.peers, "--ours", args.ours]


SECTIONS = (
    Section("machine", "Machine"),
    Section("bandwidth", "Read bandwidth"),
    Section("decode", "Decode and prefill, engines side by side", _engines),
    Section("attention", "Attention over the cache"),
    Section("collectives", "Sums between ranks on one host"),
    Section("head", "The head's own time per step"),
    Section("fan_out", "The protocol's cost by the number of workers"),
    Section("loading", "Loading", _repeated),
    Section("start", "Start to first token", _repeated),
    Section("growth", "Growth with ranks, batch and context"),
    Section("protocol", "Commands, one by one", is_extra=True),
    Section("journal", "The journal", is_extra=True),
    Section("sampler", "The sampler", is_extra=True),
    Section("serve", "What HTTP costs", _repeated, is_extra=True),
)


def main() -> None:
    args = _arguments()
    args.model = ensure_model(args.model)
    failed = []
    print("# Benchmarks\n")
    with tempfile.TemporaryDirectory() as folder:
        for section in args.only:
            print(f"## {section.title}\n", flush=True)
            if not _run(section, args, folder):
                failed.append(section.name)
                print(f"\n**This section failed** (`python -m bench.{section.name}`).")
            print(flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=chosen_sections, default=[each for each in SECTIONS if not each.is_extra])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--peers", default="all", help="names of `bench.decode --peers`, all, or none")
    parser.add_argument("--ours", default="all", help="names of `bench.decode --ours`, all, or none")
    return parser.parse_args()


def chosen_sections(text: str) -> list[Section]:
    """The sections that are named, in the page's order."""
    names = set(text.split(","))
    if unknown := names.difference(each.name for each in SECTIONS):
        known = ", ".join(each.name for each in SECTIONS)
        raise argparse.ArgumentTypeError(f"no such section: {', '.join(sorted(unknown))}; there are {known}")
    return [each for each in SECTIONS if each.name in names]


def _run(section: Section, args: argparse.Namespace, folder: str) -> bool:
    command = [sys.executable, "-m", f"bench.{section.name}", *section.arguments(args)]
    print(f"== {' '.join(command[1:])}", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    environment = {**os.environ, ROOT_VARIABLE: str(os.getpid()), FOLDER_VARIABLE: folder}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stdout)
    print(f"== {section.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    main()
