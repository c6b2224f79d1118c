# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loading the native core, and its C interface in Python's terms.

Rules: the library is loaded once, when first asked for, and then told which OpenMP runtime this process has, so that no
second one comes in. `why_not` says why there is none. The structures mirror src/api.h, the limits src/limits.h.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from metrale_ray.native.compile import LIBRARY, sources_digest

LIBRARY_VAR = "METRALE_NATIVE_LIBRARY"  # another file, for tests under sanitizers; "none": go without
HOW_TO_BUILD = "with a C++ compiler installed, `python -m metrale_ray.native.compile` builds it"

FP32, BF16, INT8, FP16 = 0, 1, 2, 3
BLOCK = 16  # outputs of a packed block
STEPS = {FP32: 1, BF16: 2, INT8: 4}  # inputs that lie together
MAX_HEAD_DIM = 256
MAX_EXPERTS = 1024
MAX_GROUP = 48  # query heads to a kv head
ACTIVATIONS = {"silu": 0, "swish": 0, "relu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}


class Matrix(ctypes.Structure):
    """Packed weights [outputs, inputs]."""

    _fields_ = (
        ("items", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("format", c_int32),
    )


class Experts(ctypes.Structure):
    """A layer's experts on one rank, or one gated mlp."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_scales", c_void_p),
        ("down_scales", c_void_p),
        ("first", c_int32),
        ("count", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("format", c_int32),
        ("activation", c_int32),
    )


class Rows(ctypes.Structure):
    """Rows of activations; `stride` counts items."""

    _fields_ = (("items", c_void_p), ("stride", c_int64), ("count", c_int32), ("format", c_int32))


class Cache(ctypes.Structure):
    """One layer's keys and values."""

    _fields_ = (
        ("items", c_void_p),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int32),
        ("format", c_int32),
    )


class Spans(ctypes.Structure):
    """A step's spans, as addresses of arrays of 32-bit numbers."""

    _fields_ = (
        ("first_row", c_void_p),
        ("start", c_void_p),
        ("first_block", c_void_p),
        ("blocks", c_void_p),
        ("count", c_int32),
        ("num_blocks", c_int32),
    )


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mr_instructions": (c_char_p, ()),
    "mr_use_instructions": (c_int32, (c_char_p,)),
    "mr_sets": (c_char_p, ()),
    "mr_build": (c_char_p, ()),
    "mr_use_openmp": (None, (c_void_p, c_void_p, c_void_p)),
    "mr_pack": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int32)),
    "mr_quantize": (None, (POINTER(Rows), c_int32, c_int32, c_void_p, c_void_p, c_int32)),
    "mr_unpack_rows": (None, (POINTER(Matrix), c_void_p, c_int32, POINTER(Rows))),
    "mr_linear": (None, (POINTER(Matrix), POINTER(Rows), POINTER(Rows), c_int32, c_int32)),
    "mr_experts": (
        None,
        (POINTER(Experts), POINTER(Rows), c_void_p, c_void_p, c_int32, POINTER(Rows), c_int32, c_void_p, c_int32),
    ),
    "mr_norm": (None, (POINTER(Rows), c_void_p, c_int32, c_float, POINTER(Rows), c_int32)),
    "mr_rotate": (None, (POINTER(Rows), c_int32, c_int32, c_void_p, c_float, c_void_p, c_void_p, c_int32)),
    "mr_route": (
        None,
        (POINTER(Rows), c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_int32),
    ),
    "mr_store_kv": (c_int32, (POINTER(Cache), POINTER(Spans), POINTER(Rows), c_int32, c_int32)),
    "mr_attend": (
        None,
        (POINTER(Cache), POINTER(Spans), POINTER(Rows), c_int32, c_int32, c_float, POINTER(Rows), c_int32),
    ),
    "mr_shared_size": (c_int64, (c_int32, c_int64)),
    "mr_shared_format": (None, (c_void_p, c_int32, c_int64, c_uint64)),
    "mr_shared_open": (c_void_p, (c_void_p, c_int64, c_uint64, c_int32, c_int32, c_int64)),
    "mr_shared_sum": (c_int32, (c_void_p, c_void_p, c_int64, c_int32, c_int64)),
    "mr_shared_broadcast": (c_int32, (c_void_p, c_int32, c_void_p, c_int64, c_int64)),
    "mr_shared_gather": (c_int32, (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64)),
    "mr_shared_awaited": (c_int32, (c_void_p,)),
    "mr_shared_close": (None, (c_void_p,)),
}


def library() -> ctypes.CDLL | None:
    """The core, or None where `why_not` says why."""
    return _found()[0]


def why_not() -> str:
    """Why there is no core, with what to do; empty where there is one."""
    return _found()[1]


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """One function of the core, which must be there, with its types set. Raises AttributeError for an unknown one."""
    core = library()
    if core is None:
        raise AttributeError(f"{name}: there is no native core: {why_not()}")
    found = core[name]  # an object of its own each time, so its types are this caller's
    found.restype, found.argtypes = result, list(arguments)
    return found


def instructions() -> str:
    """The instruction set whose kernels run in this process. Raises AttributeError without a core."""
    return str(function("mr_instructions", c_char_p)().decode())


def build() -> str:
    """What the core was built from and with: a digest of its sources, and the compiler."""
    return str(function("mr_build", c_char_p)().decode())


def sets() -> list[str]:
    """The instruction sets that the core was built for, whether or not they run here. Raises AttributeError without."""
    return str(function("mr_sets", c_char_p)().decode()).split()


def share_openmp(core: ctypes.CDLL) -> bool:
    """Let the core use the OpenMP threads that this process has already, as torch's products do; whether it has any."""
    process = ctypes.CDLL(None)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    if not all(hasattr(process, name) for name in names):
        return False
    core.mr_use_openmp(*(ctypes.cast(process[name], c_void_p) for name in names))
    return True


@functools.cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    path = Path(os.environ.get(LIBRARY_VAR) or LIBRARY)
    if str(path) == "none":
        return None, f"{LIBRARY_VAR} is none"
    if not path.is_file():
        return None, f"it was not built when metrale-ray was installed; {HOW_TO_BUILD}"
    try:
        core = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} does not load: {error}"
    for name, (result, arguments) in SIGNATURES.items():
        found = getattr(core, name, None)
        if found is None:
            return None, f"{path} has no {name}: it is of another version; {HOW_TO_BUILD}"
        found.restype, found.argtypes = result, arguments
    return _fitting(core, path)


def _fitting(core: ctypes.CDLL, path: Path) -> tuple[ctypes.CDLL | None, str]:
    if core.mr_instructions() is None:
        return None, f"{path} has no kernels for this processor"
    built_from = core.mr_build().decode().split(" ", 1)[0]
    if built_from != sources_digest():
        return None, f"{path} was built from other sources; {HOW_TO_BUILD}"
    share_openmp(core)
    return core, ""
