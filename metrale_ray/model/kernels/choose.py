# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which kernels a rank uses: native ones on a CPU where the core is there and knows the model's sizes, else PyTorch's.

Rules. `auto` takes native ones where they can be had; `torch` never looks further; `native` is refused, with all
reasons, where they cannot be had. Ranks tell their choice in the handshake, as other kernels give other bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from metrale_ray.errors import ConfigError
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.kernels.kernels import Kernels
from metrale_ray.model.kernels.layout import FORMATS, Layout, Packed, Plain
from metrale_ray.model.kernels.native_kernels import NativeKernels
from metrale_ray.model.kernels.torch_kernels import TorchKernels
from metrale_ray.native import library

Kind = Literal["native", "torch"]


def choose_kind(setting: str, device: torch.device, dtype: torch.dtype, decoder: DecoderConfig) -> tuple[Kind, str]:
    """The kind of kernels, and why it is not the native one. Raises ConfigError for native where it cannot be had."""
    if setting == "torch":
        return "torch", "the setting is torch"
    reasons = "; ".join(_hindrances(device, dtype, decoder))
    if not reasons:
        return "native", ""
    if setting == "native":
        raise ConfigError(f"kernels is native, and native kernels cannot be used: {reasons}. Set it to auto or torch.")
    return "torch", reasons


def make_kernels(kind: Kind, device: torch.device, dtype: torch.dtype, quantization: str = "none") -> Kernels:
    """The kernels of a kind, with the threads that this process has now. Raises ConfigError, see check_quantization."""
    check_quantization(quantization, device)
    is_quantised = quantization == "int8"
    if kind == "native":
        return NativeKernels(dtype, torch.get_num_threads(), is_quantised=is_quantised)
    return TorchKernels(device, dtype, is_quantised=is_quantised)


def layout_of(kind: Kind, quantization: str = "none") -> Layout:
    """How weights lie for kernels of a kind."""
    is_quantised = quantization == "int8"
    return Packed(is_quantised=is_quantised) if kind == "native" else Plain(is_quantised=is_quantised)


def check_quantization(setting: str, device: torch.device) -> None:
    """Raise ConfigError for a quantization that this device's kernels do not have."""
    if setting != "none" and device.type != "cpu":
        raise ConfigError(
            f"quantization is {setting}, which is for CPUs, and the device is {device.type}. "
            "Set quantization to none, or device to cpu."
        )


def kernels_name(kind: Kind) -> str:
    """What decides the bits of a kind's kernels, for ranks to compare: instruction set, sources and compiler."""
    return f"native {library.instructions()} {library.build()}" if kind == "native" else kind


def _hindrances(device: torch.device, dtype: torch.dtype, decoder: DecoderConfig) -> Iterator[str]:
    """Why native kernels cannot be used; nothing when they can."""
    if device.type != "cpu":
        yield f"they are for CPUs, and the device is {device.type}"
        return
    if library.library() is None:
        yield f"the native core is not there: {library.why_not()}"
    if dtype not in FORMATS:
        yield f"they are for float32 and bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    if decoder.head_dim > library.MAX_HEAD_DIM or decoder.head_dim % 2:
        yield f"they are for even head sizes up to {library.MAX_HEAD_DIM}, and the model's is {decoder.head_dim}"
    if decoder.num_heads > library.MAX_GROUP * decoder.num_kv_heads:
        group = decoder.num_heads // decoder.num_kv_heads
        yield f"they are for up to {library.MAX_GROUP} query heads to a kv head, and the model has {group}"
    if decoder.activation not in library.ACTIVATIONS:
        yield f"they do not know the activation {decoder.activation}"
    if decoder.moe is not None and decoder.moe.num_experts > library.MAX_EXPERTS:
        yield f"they are for up to {library.MAX_EXPERTS} experts a layer, and the model has {decoder.moe.num_experts}"
