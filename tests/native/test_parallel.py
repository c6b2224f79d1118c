# SPDX-License-Identifier: MIT OR Apache-2.0
"""The core's teams of threads: OpenMP's, which the process has already, and its own where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.kernels.layout import packed
from metrale_ray.model.kernels.native_kernels import NativeKernels
from metrale_ray.native import library
from tests.native.instructions import needs_core

pytestmark = needs_core


@contextmanager
def without_openmp() -> Iterator[None]:
    """The core runs threads of its own."""
    core = library.library()
    assert core is not None
    core.mr_use_openmp(None, None, None)
    try:
        yield
    finally:
        library.share_openmp(core)


def linear(seed: int, threads: int, rows: int = 5, outputs: int = 150) -> Callable[[], torch.Tensor]:
    """A product that gives a new tensor each time, from buffers of its own."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, 33, generator=generator), torch.randn(outputs, 33, generator=generator)
    product = NativeKernels(torch.float32, threads).linear(packed(weight), (outputs, 33))
    return lambda: product(x).clone()


def experts(seed: int, threads: int, rows: int = 9) -> Callable[[], torch.Tensor]:
    """Experts' sums, which have barriers in them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 20, generator=generator)
    chosen = torch.randint(4, (rows, 2), generator=generator, dtype=torch.int32)
    weights = torch.rand(rows, 2, generator=generator)
    gate_up = torch.cat([packed(torch.randn(24, 20, generator=generator)) for _ in range(8)])
    down = torch.cat([packed(torch.randn(20, 24, generator=generator)) for _ in range(4)])
    local = NativeKernels(torch.float32, threads).experts(
        range(4), gate_up, down, 20, MoeConfig(4, 2, 24, False, False), "silu"
    )

    def write() -> torch.Tensor:
        out = torch.empty_like(x)
        local.write(out, x, chosen, weights)
        return out

    return write


@pytest.mark.parametrize("operation", [linear, experts])
def test_threads_of_the_core_give_the_bits_of_openmp(operation: Callable[..., Callable[[], torch.Tensor]]) -> None:
    want = operation(0, 1)()
    for threads in (2, 3, 7, 2, 1):  # larger teams and smaller ones after them
        assert torch.equal(operation(0, threads)(), want)
        with without_openmp():
            assert torch.equal(operation(0, threads)(), want)


@pytest.mark.parametrize("has_openmp", [True, False])
def test_two_threads_may_call_the_core_at_once(has_openmp: bool, scale: int) -> None:
    """Each has memory of its own to work in; sizes differ, so that what is shared would show."""
    operations = [linear(1, 2, rows=3), experts(2, 3), linear(3, 3, rows=40, outputs=300), experts(4, 2, rows=60)]
    wants = [operation() for operation in operations]

    def repeat(first: int) -> bool:
        numbers = [(first + turn) % len(operations) for turn in range(0, 20 * scale, 2)]
        return all(torch.equal(operations[number](), wants[number]) for number in numbers)

    def both() -> list[bool]:
        with ThreadPoolExecutor(2) as callers:
            return list(callers.map(repeat, (0, 1)))

    if has_openmp:
        assert all(both())
    else:
        with without_openmp():
            assert all(both())


def test_this_process_has_one_openmp_which_the_core_uses() -> None:
    core = library.library()
    assert core is not None
    assert library.share_openmp(core)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len(runtimes) == 1
