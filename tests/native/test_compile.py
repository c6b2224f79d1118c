# SPDX-License-Identifier: MIT OR Apache-2.0
"""Building the core: what goes in, what is left out, and that nothing half built stays."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from metrale_ray.native import compile as building
from metrale_ray.native.compile import WIDE, BuildFailed, InstructionSet, compile_library

HAS_COMPILER = any(map(shutil.which, building.COMPILERS))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
PLAIN = InstructionSet("plain", 8, ())


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that are compiled in no time, in the place of the core's."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "kernels.cpp").write_text('extern "C" int kernel() { return MR_WIDTH; }\n')
    for name in building.COMMON:
        (sources / name).write_text(f"const char* const {name.split('.')[0]} = MR_SOURCES;\n")
    monkeypatch.setattr(building, "SOURCES", sources)
    return sources


@needs_compiler
def test_a_set_that_the_compiler_does_not_know_is_left_out_and_named(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unknown = InstructionSet("newer", 8, ("-mno-such-instructions",))
    assert compile_library(tmp_path / "core.so", sets=[PLAIN, unknown]) == ["plain"]
    assert "kernels for newer were left out" in capfd.readouterr().err
    assert (tmp_path / "core.so").is_file()


@needs_compiler
def test_a_set_of_another_machine_is_not_built(tiny: Path, tmp_path: Path) -> None:
    other = InstructionSet("other", 8, (), ("a machine that is none",))
    here = InstructionSet("here", 8, (), (platform.machine(),))
    assert compile_library(tmp_path / "core.so", sets=[other, here]) == ["here"]


@needs_compiler
def test_sources_that_do_not_compile_leave_the_old_core_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    core = tmp_path / "lib" / "core.so"
    core.write_text("the old one")
    (tiny / building.COMMON[0]).write_text("no C++\n")
    with pytest.raises(BuildFailed, match="does not name a type"):
        compile_library(core, sets=[PLAIN])
    (tiny / "kernels.cpp").write_text("#error no instructions at all\n")
    with pytest.raises(BuildFailed, match="no instructions at all"):
        compile_library(core, sets=[PLAIN])
    assert core.read_text() == "the old one"
    assert list(core.parent.iterdir()) == [core]


def test_without_a_compiler_the_error_says_what_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(BuildFailed, match="there is no /nonexistent/c"):
        compile_library(tmp_path / "core.so")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert building.main() == 1
    assert "there is no c++ or g++ or clang++ on the path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_file_of_the_sources_counts_in_their_digest(tiny: Path) -> None:
    before = building.sources_digest()
    (tiny / "more.h").write_text("")
    with_more = building.sources_digest()
    (tiny / "more.h").write_text("// changed\n")
    assert len({before, with_more, building.sources_digest()}) == 3


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_sets_share_no_function_that_the_linker_could_take_from_the_wrong_one(tmp_path: Path) -> None:
    """An inline function without a set's name exists once in the library: from a set whose instructions may be missing.

    Nothing is inlined here that may be left out, so whatever could be shared is seen, whichever compiler builds.
    """
    made = tmp_path / "kernels.o"
    defines = (f"-DMR_ISA={WIDE.name}", f"-DMR_WIDTH={WIDE.width}")
    source = str(building.SOURCES / building.KERNELS)
    command = [building.find_compiler(), *building.FLAGS, "-O0", *WIDE.flags, *defines, "-c", source, "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    names = subprocess.run(["nm", "--defined-only", str(made)], check=True, capture_output=True, text=True).stdout
    kinds = [line.split(maxsplit=2)[1:] for line in names.splitlines()]
    shared = [name for kind, name in kinds if kind in "WVu" and f"{len(WIDE.name)}{WIDE.name}" not in name]
    assert [name for name in shared if not name.startswith("DW.ref.")] == []  # these are data, alike for all
    assert [name for kind, name in kinds if kind in "TDBR"] == [f"kernels_of_{WIDE.name}"]
