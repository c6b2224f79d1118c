# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loading the core: what is refused and why, and that Python's structures are those of the sources."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrale_ray.native import compile as building
from metrale_ray.native import library
from tests.native.instructions import needs_core
from tests.native.test_compile import needs_compiler

STRUCTURES = (library.Matrix, library.Experts, library.Rows, library.Cache, library.Spans)


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file that is loaded next, as if for the first time."""
    path = tmp_path / "core.so"
    monkeypatch.setenv(library.LIBRARY_VAR, str(path))
    library._found.cache_clear()
    yield path
    library._found.cache_clear()


def test_without_a_core_the_reason_says_what_to_do(looked_for: Path) -> None:
    assert library.library() is None
    assert "was not built" in library.why_not()
    assert "python -m metrale_ray.native.compile" in library.why_not()
    with pytest.raises(AttributeError, match="there is no native core: it was not built"):
        library.instructions()


def test_one_can_go_without_the_core(looked_for: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.LIBRARY_VAR, "none")
    assert library.library() is None
    assert library.why_not() == "METRALE_NATIVE_LIBRARY is none"


def test_a_file_that_is_no_library_is_refused(looked_for: Path) -> None:
    looked_for.write_text("text")
    assert library.library() is None
    assert f"{looked_for} does not load" in library.why_not()


@needs_compiler
def test_a_library_of_another_version_is_refused(looked_for: Path) -> None:
    build(looked_for, 'extern "C" int mr_instructions() { return 0; }\n')
    assert library.library() is None
    assert "it is of another version" in library.why_not()


@needs_compiler
def test_a_core_of_other_sources_is_refused(looked_for: Path) -> None:
    build(looked_for, core_like(instructions='"generic"', build='"0000 1.2.3"'))
    assert library.library() is None
    assert "was built from other sources" in library.why_not()


@needs_compiler
def test_a_core_without_kernels_for_this_processor_is_refused(looked_for: Path) -> None:
    build(looked_for, core_like(instructions="nullptr", build=f'"{building.sources_digest()} 1.2.3"'))
    assert library.library() is None
    assert "has no kernels for this processor" in library.why_not()


@needs_core
def test_the_core_tells_what_runs_and_what_it_was_built_with() -> None:
    assert library.why_not() == ""
    assert library.instructions() in {known.name for known in (*building.SETS, building.WIDE)}
    digest, compiler = library.build().split(" ", 1)
    assert digest == building.sources_digest()
    assert compiler
    assert library.instructions() in library.sets()


@needs_compiler
def test_structures_and_limits_are_those_of_the_sources(tmp_path: Path) -> None:
    shapes = [
        f"{s.__name__} {name} {getattr(s, name).offset} {getattr(s, name).size}"
        for s in STRUCTURES
        for name, _ in s._fields_
    ]
    shapes += [f"{s.__name__} {ctypes.sizeof(s)}" for s in STRUCTURES]
    limits = {
        name: getattr(library, name)
        for name in ("MAX_HEAD_DIM", "MAX_EXPERTS", "MAX_GROUP", "FP32", "BF16", "INT8", "FP16")
    }
    activations = {
        name.upper().replace("PYTORCH_", ""): n for name, n in library.ACTIVATIONS.items() if name != "swish"
    }
    wanted = [*shapes, *(f"{name} {number}" for name, number in (limits | activations).items())]
    assert run(tmp_path, list(describe(limits | activations))) == wanted


def describe(names: dict[str, int]) -> Iterator[str]:
    """Lines of C++ that write what the sources say."""
    for s in STRUCTURES:
        for name, _ in s._fields_:
            kind, size = f"offsetof({s.__name__}, {name})", f"sizeof({s.__name__}::{name})"
            yield f'printf("{s.__name__} {name} %zu %zu\\n", {kind}, {size});'
    for s in STRUCTURES:
        yield f'printf("{s.__name__} %zu\\n", sizeof({s.__name__}));'
    for name in names:
        yield f'printf("{name} %d\\n", int({name}));'


def run(folder: Path, lines: list[str]) -> list[str]:
    """What a program of these lines writes, which knows the core's headers."""
    source = folder / "shapes.cpp"
    headers = ("<cstdio>", '"api.h"', '"limits.h"')
    body = "\n".join([*(f"#include {header}" for header in headers), "int main() {", *lines, "}"])
    source.write_text(body)
    include = f"-I{building.SOURCES}"
    command = [building.find_compiler(), "-std=c++17", include, str(source), "-o", str(folder / "shapes")]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([folder / "shapes"], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def core_like(instructions: str, build: str) -> str:
    """A library that has every function of the core by name."""
    told = {"mr_instructions": instructions, "mr_build": build}
    functions = (f"const char* {name}() {{ return {told.get(name, 'nullptr')}; }}" for name in library.SIGNATURES)
    return 'extern "C" {\n' + "\n".join(functions) + "\n}\n"


def build(path: Path, text: str) -> None:
    source = path.with_suffix(".cpp")
    source.write_text(text)
    command = [building.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
