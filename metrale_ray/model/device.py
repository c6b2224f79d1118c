# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device that a rank computes on, the threads that it computes with on the CPU, and where these may run."""

from __future__ import annotations

import contextlib
import logging

import torch

from metrale_ray.config import EngineConfig
from metrale_ray.core_claims import pinned
from metrale_ray.errors import ConfigError

log = logging.getLogger(__name__)


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


def own_cores(config: EngineConfig, rank: int) -> contextlib.AbstractContextManager[object]:
    """Keep the calling thread, and the compute threads that it makes, on CPUs that this rank alone has.

    To be entered before the thread computes anything: what it computes with is made at the first product, and stays
    where it was allowed then. Does nothing on a GPU, with `pin` off, and where ranks share a core.
    """
    owner = f"rank {rank}"
    if not _is_cpu(config.device) or not config.pin:
        return contextlib.nullcontext()
    if config.num_cpus_per_rank is not None and config.num_cpus_per_rank < 1:
        log.info("%s: threads: 1, not pinned: it has %g of a core", owner, config.num_cpus_per_rank)
        return contextlib.nullcontext()
    return pinned(config.threads_per_rank, owner)


def _is_cpu(name: str) -> bool:
    return name == "cpu" or (name == "auto" and not torch.cuda.is_available())


def cuda_version() -> str | None:
    """The version of CUDA that torch was built for, None for a build without."""
    return torch.version.cuda
