# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device that a rank computes on."""

from __future__ import annotations

import torch

from metrale_ray.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU that this process sees, and the CPU without one. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; allowed are auto, cpu, cuda and cuda:N") from error
    if device.type == "cuda":
        return _check_cuda(device)
    if device.type != "cpu":
        raise ConfigError(f"device is {name!r}; allowed are auto, cpu, cuda and cuda:N")
    return torch.device("cpu")


def _check_cuda(device: torch.device) -> torch.device:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= num_devices:
        raise ConfigError(f"device is {str(device)!r}, and this process sees {num_devices} GPU(s)")
    return torch.device("cuda", index)


def use_threads(num_threads: int) -> None:
    """Let this process compute with so many threads; equal on all ranks, as their number changes the last bits."""
    torch.set_num_threads(num_threads)


def cuda_version() -> str | None:
    """The version of CUDA that torch was built for, None for a build without."""
    return torch.version.cuda
