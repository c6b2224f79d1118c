# SPDX-License-Identifier: MIT OR Apache-2.0
"""What native kernels are compared with: PyTorch's in fp32, from the same inputs, and how far they may be apart.

Native kernels compute in fp32 and round once, at the end. So against fp32 they differ by the order of their sums, and
in bfloat16 by that one rounding, half a unit in the last place; tiles round an inner layer too.
"""

from __future__ import annotations

import torch

from metrale_ray.model.kernels.native_kernels import NativeKernels
from metrale_ray.model.kernels.torch_kernels import TorchKernels

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
PLAIN = TorchKernels(CPU, torch.float32)


def native(dtype: torch.dtype, threads: int = 1) -> NativeKernels:
    """Native kernels with buffers of their own."""
    return NativeKernels(dtype, threads)


def numbers(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tensors of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_close(got: torch.Tensor, want: torch.Tensor, size: float) -> None:
    """`got` is `want` but for rounding. `size`: of what was added up, such as the root of its squares."""
    relative = 2**-8 if got.dtype == torch.bfloat16 else 1e-5
    assert got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=relative, atol=1e-5 * (1 + size))
