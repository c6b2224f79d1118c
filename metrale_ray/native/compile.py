# SPDX-License-Identifier: MIT OR Apache-2.0
"""Builds the native core with the machine's C++ compiler: `python -m metrale_ray.native.compile`.

Rules: the standard library alone, as the package's own installation runs it too (setup.py). Kernels are compiled once
for each instruction set that the compiler knows; which of them is used is decided where they run. A core that cannot be
built leaves nothing behind, and the package works without one, slower.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "libmetrale_native.so"
COMMON = ("parallel.cpp", "core.cpp", "shared.cpp")
KERNELS = "kernels.cpp"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)
COMPILERS = ("c++", "g++", "clang++")


class BuildFailed(Exception):
    """The core cannot be built here; the text says why."""


class InstructionSet(NamedTuple):
    """`width`: lanes of 32 bits that its kernels are written for. `machines`: of `platform.machine()`; empty: all."""

    name: str
    width: int
    flags: tuple[str, ...]
    machines: tuple[str, ...] = ()


AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
SETS = (
    InstructionSet("generic", 8, ()),
    InstructionSet("avx2", 8, ("-mavx2", "-mfma"), ("x86_64",)),
    InstructionSet("avx512", 16, AVX512, ("x86_64",)),
    InstructionSet("amx", 16, (*AVX512, "-mamx-tile", "-mamx-bf16", "-DMR_TILES"), ("x86_64",)),
)
# The text of the widest sets, tiles too, without their instructions: runs anywhere, slowly. For tests.
WIDE = InstructionSet("wide", 16, ("-DMR_TILES", "-DMR_TILES_EMULATED"))


def compile_library(
    library: Path = LIBRARY, extra_flags: Sequence[str] = (), sets: Sequence[InstructionSet] = SETS
) -> list[str]:
    """Build `library` and give the names of the instruction sets in it. Raises BuildFailed."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="metrale-native-") as folder:
        build = _Build(compiler, Path(folder), tuple(extra_flags))
        fitting = [s for s in sets if not s.machines or platform.machine() in s.machines]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            kernels = dict(zip(fitting, threads.map(build.kernels, fitting), strict=True))
            known = [s for s, built in kernels.items() if built is not None]
            if not known:
                raise BuildFailed(f"{compiler} cannot compile {KERNELS}:\n{build.complaint}")
            objects = list(threads.map(lambda name: build.common(name, known), COMMON))
        build.link([*objects, *(built for built in kernels.values() if built is not None)], library)
    return [s.name for s in known]


def find_compiler() -> str:
    """The C++ compiler that CXX names, or the first usual one on the path. Raises BuildFailed."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildFailed(f"no C++ compiler was found: there is no {' or '.join(names)} on the path")


def sources_digest() -> str:
    """A digest of the sources, which a built core carries."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class _Build:
    def __init__(self, compiler: str, folder: Path, extra_flags: tuple[str, ...]) -> None:
        self.complaint = ""
        self._compiler = compiler
        self._folder = folder
        self._flags = (*FLAGS, *extra_flags)

    def kernels(self, instruction_set: InstructionSet) -> Path | None:
        """The kernels of one instruction set; None where the compiler does not know it."""
        name = instruction_set.name
        defines = (f"-DMR_ISA={name}", f"-DMR_WIDTH={instruction_set.width}")
        try:
            return self._compile(KERNELS, f"kernels_{name}.o", (*instruction_set.flags, *defines))
        except BuildFailed as error:
            self.complaint = str(error)
            print(f"the kernels for {name} were left out: {self.complaint}", file=sys.stderr)
            return None

    def common(self, name: str, sets: Sequence[InstructionSet]) -> Path:
        """What all instruction sets share; it knows which there are."""
        defines = [f"-DMR_HAS_{s.name.upper()}" for s in sets]
        names = " ".join(s.name for s in sets)
        return self._compile(
            name, f"{name}.o", (*defines, f'-DMR_SETS="{names}"', f'-DMR_SOURCES="{sources_digest()}"')
        )

    def link(self, objects: Sequence[Path], library: Path) -> None:
        """All of it in one library, in its place only when it is whole."""
        made = self._folder / library.name
        self._run(["-shared", "-pthread", *self._flags, *map(str, objects), "-o", str(made)])
        beside = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(made, beside)
        beside.replace(library)

    def _compile(self, source: str, made: str, flags: Sequence[str]) -> Path:
        target = self._folder / made
        self._run(["-c", *self._flags, *flags, str(SOURCES / source), "-o", str(target)])
        return target

    def _run(self, arguments: Sequence[str]) -> None:
        done = subprocess.run([self._compiler, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise BuildFailed(f"{self._compiler} ended with {done.returncode}:\n{done.stderr.strip()[-4000:]}")
        if done.stderr.strip():
            print(done.stderr.strip(), file=sys.stderr)


def main() -> int:
    """Build it in its place and say so."""
    try:
        sets = compile_library()
    except BuildFailed as error:
        print(f"error: the native core was not built: {error}", file=sys.stderr)
        return 1
    print(f"built {LIBRARY} for {', '.join(sets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
