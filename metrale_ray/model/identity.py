# SPDX-License-Identifier: MIT OR Apache-2.0
"""What decides the bits that a rank computes: the code it runs and the instructions that its kernels choose from.

The handshake compares all as short texts. Leaves out dtype, threads and settings, which are compared on their own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

import torch

from metrale_ray.control_groups import ROOT, lines

# torch, oneDNN and MKL pick their kernels by these, and by the maker.
FLAGS = ("fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8")


@functools.cache  # the code that runs is the one that was there first
def build() -> str:
    """The digest of the package's own source files: two trees of one version may differ."""
    return source_digest(Path(__file__).parents[1])


@functools.cache  # what was imported stays, whatever is installed over it
def versions() -> dict[str, str]:
    """The versions of what the code stands on, as this process has them; Ray's is what is installed."""
    return {"python": platform.python_version(), "ray": _installed("ray"), "torch": str(torch.__version__)}


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree that was put on the path
        return "unknown"


def source_digest(package: Path) -> str:
    """A digest of the names and contents of all Python files in a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def instructions(device: torch.device, root: Path = ROOT) -> str:
    """The processor's or the GPU's kind, as far as kernels are chosen by it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    maker, flags = _processor(root)
    known = " ".join(flag for flag in FLAGS if flag in flags)
    return f"{torch.backends.cpu.get_cpu_capability()} {maker} {known}".strip()


def _processor(root: Path) -> tuple[str, set[str]]:
    """Maker and flags of the first core; empty where /proc/cpuinfo does not tell."""
    fields: dict[str, str] = {}
    for line in lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields.get("vendor_id", ""), set(fields.get("flags", "").split())
