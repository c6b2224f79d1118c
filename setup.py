# SPDX-License-Identifier: MIT OR Apache-2.0
"""Builds the native core while the package is installed, where there is a C++ compiler; without one it goes on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NAME = "metrale_ray.native.libmetrale_native"
COMPILE = Path(__file__).parent / "metrale_ray" / "native" / "compile.py"


class BuildCore(build_ext):
    """The core is a plain shared library, which Python loads by ctypes: it depends on no version of Python or torch."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's own name, without Python's tags."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Build it, or say why not and go on."""
        compiling = _load_compile()
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            sets = compiling.compile_library(target)
        except compiling.BuildFailed as error:
            print(f"metrale-ray: the native core was NOT built; PyTorch's kernels will be used. {error}")
        else:
            print(f"metrale-ray: the native core was built for {', '.join(sets)}")


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3: the core depends on the one and not on the other."""

    def get_tag(self) -> tuple[str, str, str]:
        """(Python, its interface, platform)."""
        return "py3", "none", super().get_tag()[2]


def _load_compile() -> Any:
    spec = importlib.util.spec_from_file_location("metrale_native_compile", COMPILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Optional: an editable installation goes on where the core was not built.
CORE = Extension(NAME, sources=[], optional=True)

setup(ext_modules=[CORE], cmdclass={"build_ext": BuildCore, "bdist_wheel": PlatformWheel})
