# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which attention a rank uses: the native one beside native kernels, a flash kernel where GPU, model and an installed
package allow one, else SDPA.

Rules. `auto` takes the first of these that can be had; `sdpa` never looks further; `native` and `flash` are refused,
with all reasons, where they cannot be had. The choice follows from its arguments and from what is installed; a process
makes it once and logs it once. Ranks tell it in the handshake, as different kernels give different bits.

A package that is there but does not import (its binary was built for another torch) is a reason like any other.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from metrale_ray.errors import ConfigError
from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.attention.flash import FlashAttention
from metrale_ray.model.attention.flash_adapter import GENERATION, Adapter, FlashKernel, adapter_for
from metrale_ray.model.attention.native import NativeAttention
from metrale_ray.model.attention.packed_cache import PackedKvCache
from metrale_ray.model.attention.sdpa import SdpaAttention
from metrale_ray.model.kernels.choose import Kind
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.native.library import BLOCK

log = logging.getLogger(__name__)

FUNCTION = "flash_attn_varlen_func"
# What the kernels take: of both packages, from their own checks.
FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8  # other sizes are padded by a copy of the whole cache, or refused
BLOCK_SIZE_STEP = 16
OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """`name` is what ranks compare and the log says; `build` makes the attention over a cache of the class `cache`."""

    name: str
    build: Callable[[KvCache], Attention[Any]]
    cache: type[KvCache] = KvCache


SDPA = AttentionChoice("sdpa", SdpaAttention)
NATIVE = AttentionChoice("native", NativeAttention, PackedKvCache)


@dataclass(frozen=True, slots=True)
class Package:
    """One place where the function may be. `distribution` is the installed project whose version is told."""

    module: str
    distribution: str
    load: Callable[[], ModuleType]


PACKAGES = (
    Package("vllm_flash_attn", "vllm-flash-attn", lambda: importlib.import_module("vllm_flash_attn")),
    Package("vllm.vllm_flash_attn", "vllm", lambda: importlib.import_module("vllm.vllm_flash_attn")),
)


@cache
def choose_attention(
    setting: str, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int, kernels: Kind = "torch"
) -> AttentionChoice:
    """The attention for `setting`: auto, native, sdpa or flash. Raises ConfigError for one that cannot be had.

    `kernels` is the kind of the rank's other kernels.
    """
    kernel, reasons = None, ["the setting is sdpa"]
    if setting in ("auto", "native"):
        hindrances = native_limits(block_size, kernels)
        if not hindrances:
            log.info("attention: native")
            return NATIVE
        _refuse(setting, "native", hindrances)
    if setting in ("auto", "flash"):
        kernel, reasons = _flash(device, dtype, block_size, head_dim)
    if kernel is None:
        _refuse(setting, "flash", reasons)
    if kernel is None:
        log.info("attention: %s (no flash: %s)", SDPA.name, "; ".join(reasons))
        return SDPA
    log.info("attention: %s", kernel.name)
    return AttentionChoice(kernel.name, lambda cache: FlashAttention(cache, kernel))


def _refuse(setting: str, name: str, reasons: list[str]) -> None:
    if setting == name:
        raise ConfigError(
            f"attention_backend is '{name}', which cannot be had here: {'; '.join(reasons)}. Change that, or set "
            "attention_backend to auto or sdpa."
        )


def native_limits(block_size: int, kernels: Kind) -> list[str]:
    """What keeps native attention from this model; empty when nothing does."""
    found = []
    if kernels != "native":
        found.append("this rank does not use native kernels")
    if block_size % BLOCK:
        found.append(f"it needs a block_size that is a multiple of {BLOCK}, and block_size is {block_size}")
    return found


def _flash(
    device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
) -> tuple[FlashKernel | None, list[str]]:
    """The first kernel that can be used, or every reason why there is none. Nothing is imported without need."""
    reasons = flash_limits(device, dtype, block_size, head_dim)
    if reasons:
        return None, reasons
    capability = torch.cuda.get_device_capability(device)
    for package in PACKAGES:
        found = find_kernel(package, capability)
        if isinstance(found, FlashKernel):
            return found, []
        reasons.append(found)
    return None, reasons


def flash_limits(device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int) -> list[str]:
    """What keeps every flash kernel from this device and this model; empty when nothing does."""
    found = []
    if device.type != "cuda":
        found.append(f"the device is {device.type}, and flash kernels need a CUDA GPU")
    if dtype not in FLASH_DTYPES:
        found.append(f"the dtype is {_short(dtype)}, not {' or '.join(map(_short, FLASH_DTYPES))}")
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        found.append(f"head_dim is {head_dim}, not a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}")
    if block_size % BLOCK_SIZE_STEP:
        found.append(f"block_size is {block_size}, not a multiple of {BLOCK_SIZE_STEP}")
    return found


def find_kernel(package: Package, capability: tuple[int, int]) -> FlashKernel | str:
    """The package's kernel for a GPU of this compute capability, or the reason why it has none."""
    try:
        module = package.load()
    except ModuleNotFoundError as error:
        return f"{package.module} is not installed ({error})"
    except (ImportError, OSError, RuntimeError) as error:  # a binary for another torch or CUDA
        return f"{package.module} does not import here ({type(error).__name__}: {error})"
    function = getattr(module, FUNCTION, None)
    if function is None:
        return f"{package.module} has no {FUNCTION}"
    adapter = adapter_for(function)
    if adapter is None:
        return f"{package.module}.{FUNCTION} has a signature that is not known: {inspect.signature(function)}"
    reason = _machine_limit(package, module, adapter, capability)
    return reason or FlashKernel(f"{package.module} {_version(package)}", function, adapter)


def _machine_limit(package: Package, module: ModuleType, adapter: Adapter, capability: tuple[int, int]) -> str | None:
    """Why the package's kernels do not run on a GPU of this compute capability, None when they do."""
    oldest, newest = OLDEST_CAPABILITY, adapter.newest_capability
    if capability < oldest or (newest is not None and capability > newest):
        upwards = f"from {_dotted(oldest)} on" if newest is None else f"from {_dotted(oldest)} to {_dotted(newest)}"
        return f"{package.module} is for compute capability {upwards}, and the GPU has {_dotted(capability)}"
    ask = getattr(module, "fa_version_unsupported_reason", None)
    reason = ask(fa_version=GENERATION) if ask is not None else None
    return f"{package.module}: {reason}" if reason else None


def _version(package: Package) -> str:
    try:
        return metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"  # built in place, without metadata


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
