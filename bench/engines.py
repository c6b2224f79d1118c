# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engines that `decode` compares: how each is started, whether it can be here, and what its steps must read.

A peer runs in an environment of its own, which a variable names by its Python. What is not there is left out, and said.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from bench.bound import Layout

VLLM_VARIABLE = "BENCH_VLLM_PYTHON"
LLAMA_VARIABLE = "BENCH_LLAMA_PYTHON"
VLLM_LIBRARIES = ("libiomp5.so", "libtcmalloc_minimal.so.4")  # its documentation asks for both
WHOLE, INT8 = Layout(), Layout(is_int8=True)
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True)
class EngineCase:
    """One row of the table. `layout` is what its bound is of; `settings` are of this engine, `gguf` ends a name."""

    name: str
    label: str
    module: str
    arguments: tuple[str, ...] = ()
    variable: str | None = None
    layout: Layout = WHOLE
    settings: tuple[tuple[str, str], ...] = ()
    gguf: str | None = None

    @property
    def is_peer(self) -> bool:
        """Whether it is another engine than this one."""
        return self.module != "ours"

    def missing(self) -> str | None:
        """Why it cannot run here; None where it can."""
        if self.variable is not None:
            path = os.environ.get(self.variable)
            if not path:
                return f"{self.variable} names no Python with it"
            return None if Path(path).exists() else f"{self.variable} is {path}, which is not there"
        unknown = [name for name, _ in self.settings if name not in _known_settings()]
        return f"no setting `{unknown[0]}` in this build" if unknown else None

    def command(self, python: str, model: Path) -> list[str]:
        """How it is started in the repository's root, without the arguments that all cases have."""
        chosen = os.environ[self.variable] if self.variable else python
        more = [f"--set={name}={value}" for name, value in self.settings]
        if self.gguf is not None:
            more += ["--file", str(model.with_name(model.name + self.gguf))]
        return [chosen, "-m", f"bench.cases.{self.module}", str(model), *self.arguments, *more]

    def environment(self) -> dict[str, str]:
        """Variables that it is started with besides this process's own."""
        if self.module != "vllm":
            return {}
        folders = [str(Path(os.environ[VLLM_VARIABLE]).parents[1] / "lib"), *LIBRARY_FOLDERS]
        paths = [Path(folder) / name for name in VLLM_LIBRARIES for folder in folders]
        found = {path.name: str(path) for path in reversed(paths) if path.exists()}
        return {"LD_PRELOAD": ":".join(found.values())} if found else {}


def _known_settings() -> set[str]:
    from metrale_ray.config import EngineConfig

    return {field.name for field in dataclasses.fields(EngineConfig)}


_INT8 = ("quantization", "int8")
_REPLICATED, _TENSOR = ("attention", "replicated"), ("attention", "tensor")
_TWO = ("--ranks", "2")

ENGINE_CASES = (
    EngineCase("one", "one rank", "ours"),
    EngineCase("vllm", "vLLM, one process", "vllm", variable=VLLM_VARIABLE),
    EngineCase(
        "two-replicated", "two ranks, attention replicated", "ours", _TWO, layout=Layout(2), settings=(_REPLICATED,)
    ),
    EngineCase("two-tensor", "two ranks, attention tensor", "ours", _TWO, layout=Layout(2, True), settings=(_TENSOR,)),
    EngineCase("vllm-two", "vLLM, two workers", "vllm", ("--workers", "2"), VLLM_VARIABLE, Layout(2, True)),
    EngineCase("one-int8", "one rank, int8", "ours", layout=INT8, settings=(_INT8,)),
    EngineCase(
        "two-tensor-int8",
        "two ranks, attention tensor, int8",
        "ours",
        _TWO,
        None,
        Layout(2, True, True),
        (_TENSOR, _INT8),
    ),
    EngineCase("llama", "llama.cpp, bf16", "llama", variable=LLAMA_VARIABLE, gguf=".bf16.gguf"),
    EngineCase("llama-q8", "llama.cpp, Q8_0", "llama", variable=LLAMA_VARIABLE, layout=INT8, gguf=".q8_0.gguf"),
    EngineCase("transformers", "transformers, grouped_mm", "transformers"),
)
