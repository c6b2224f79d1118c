# SPDX-License-Identifier: MIT OR Apache-2.0
"""Expert-parallel serving of mixture-of-experts language models on Ray.

The public names are `LLM`, `attach` (to an engine that runs) and its `AttachedLLM`, `SamplingParams`,
`StructuredOutputs` (the form of an answer), `EngineConfig`, `Logprob` (of which an answer has one for each candidate
that was asked for) and `__version__`. Each is looked up when it is first asked for, so that `import metrale_ray` loads
neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module

from metrale_ray.version import __version__

# Not from `typing`: the command line begins here, and an interrupt before its first line is a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from metrale_ray.attached import AttachedLLM, attach
    from metrale_ray.config import EngineConfig
    from metrale_ray.llm import LLM
    from metrale_ray.sampling.params import SamplingParams
    from metrale_ray.sampling.structured import StructuredOutputs
    from metrale_ray.serve.outputs import Logprob

__all__ = [
    "LLM",
    "AttachedLLM",
    "EngineConfig",
    "Logprob",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "attach",
]

_HOMES = {
    "LLM": "metrale_ray.llm",
    "AttachedLLM": "metrale_ray.attached",
    "attach": "metrale_ray.attached",
    "SamplingParams": "metrale_ray.sampling.params",
    "StructuredOutputs": "metrale_ray.sampling.structured",
    "EngineConfig": "metrale_ray.config",
    "Logprob": "metrale_ray.serve.outputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
