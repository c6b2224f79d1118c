# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which attention is chosen, what is logged, and what a refusal says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError
from metrale_ray.model.attention import choose
from metrale_ray.model.attention.choose import Package, choose_attention, find_kernel, flash_limits
from metrale_ray.model.attention.flash import FlashAttention
from metrale_ray.model.attention.flash_adapter import FlashKernel
from metrale_ray.model.attention.sdpa import SdpaAttention
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.model.ranks import differences, introduce, open_rank
from tests.fixtures.flash import by_length, by_start
from tests.fixtures.group import CPU
from tests.model.families.test_families import QWEN3, read

GPU = torch.device("cuda", 0)
GOOD = (torch.bfloat16, 16, 128)


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    choose_attention.cache_clear()
    yield
    choose_attention.cache_clear()


def module(function: Any = None, **more: Any) -> ModuleType:
    made = ModuleType("made")
    if function is not None:
        made.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    for name, value in more.items():
        setattr(made, name, value)
    return made


def package(load: Callable[[], ModuleType], distribution: str = "not-installed-here") -> Package:
    return Package("a.package", distribution, load)


def raising(error: Exception) -> Callable[[], ModuleType]:
    def load() -> ModuleType:
        raise error

    return load


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that there is a GPU of some compute capability, and that these packages are looked at."""

    def pretend(*packages: Package, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(choose, "PACKAGES", packages)

    return pretend


def test_a_cpu_gets_sdpa_and_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "PACKAGES", (package(raising(AssertionError("looked at"))),))
    with caplog.at_level(logging.INFO, logger="metrale_ray"):
        choice = choose_attention("auto", CPU, torch.float32, 16, 128)
        assert choose_attention("auto", CPU, torch.float32, 16, 128) is choice
    assert choice.name == "sdpa"
    assert isinstance(choice.build(KvCache(read(QWEN3), 1, 16, CPU, torch.float32)), SdpaAttention)
    assert caplog.messages == [
        "attention: sdpa (no flash: the device is cpu, and flash kernels need a CUDA GPU; "
        "the dtype is float32, not float16 or bfloat16)"
    ]


def test_flash_is_refused_with_every_reason_where_it_cannot_be_had() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_attention("flash", CPU, torch.float32, 24, 260)
    for reason in ("the device is cpu", "the dtype is float32", "block_size is 24", "head_dim is 260", "auto or sdpa"):
        assert reason in caught.value.message


def test_flash_is_taken_where_everything_allows_it(gpu: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    gpu(package(raising(ModuleNotFoundError("No module named 'a'"))), package(lambda: module(by_length), "pytest"))
    with caplog.at_level(logging.INFO, logger="metrale_ray"):
        choice = choose_attention("auto", GPU, *GOOD)
    assert choice.name == f"a.package {pytest.__version__}"
    assert caplog.messages == [f"attention: {choice.name}"]
    assert isinstance(choice.build(KvCache(read(QWEN3), 1, 16, CPU, torch.float32)), FlashAttention)
    assert choose_attention("flash", GPU, *GOOD).name == choice.name
    assert choose_attention("sdpa", GPU, *GOOD).name == "sdpa"


def test_without_a_package_a_gpu_gets_sdpa_with_the_reasons(
    gpu: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    gpu(package(raising(ModuleNotFoundError("No module named 'a'"))), package(raising(ImportError("undefined symbol"))))
    with caplog.at_level(logging.INFO, logger="metrale_ray"):
        assert choose_attention("auto", GPU, *GOOD).name == "sdpa"
    assert "a.package is not installed" in caplog.messages[0]
    assert "a.package does not import here (ImportError: undefined symbol)" in caplog.messages[0]
    with pytest.raises(ConfigError, match="undefined symbol"):
        choose_attention("flash", GPU, *GOOD)


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim", "reason"),
    [
        (torch.float32, 16, 128, "dtype is float32"),
        (torch.float16, 24, 128, "block_size is 24, not a multiple of 16"),
        (torch.float16, 16, 100, "head_dim is 100, not a multiple of 8 up to 256"),
        (torch.float16, 16, 264, "head_dim is 264"),
    ],
)
def test_each_limit_of_the_kernels_is_a_reason(dtype: torch.dtype, block_size: int, head_dim: int, reason: str) -> None:
    found = flash_limits(GPU, dtype, block_size, head_dim)
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize(("dtype", "block_size", "head_dim"), [(torch.float16, 16, 8), (torch.bfloat16, 256, 256)])
def test_limits_are_reached_without_a_reason(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    assert flash_limits(GPU, dtype, block_size, head_dim) == []


def test_what_a_package_cannot_do_is_its_reason() -> None:
    def unknown(q: Any, k: Any, v: Any) -> None: ...

    assert "has no flash_attn_varlen_func" in str(find_kernel(package(module), (9, 0)))
    assert "signature that is not known: (q:" in str(find_kernel(package(lambda: module(unknown)), (9, 0)))
    assert "from 8.0 on, and the GPU has 7.5" in str(find_kernel(package(lambda: module(by_length)), (7, 5)))
    assert "from 8.0 to 9.0, and the GPU has 10.0" in str(find_kernel(package(lambda: module(by_start)), (10, 0)))
    asked = module(by_length, fa_version_unsupported_reason=lambda fa_version: f"no generation {fa_version}")
    assert find_kernel(package(lambda: asked), (9, 0)) == "a.package: no generation 2"
    asked.fa_version_unsupported_reason = lambda fa_version: None  # type: ignore[attr-defined]
    assert isinstance(find_kernel(package(lambda: asked), (10, 0)), FlashKernel)


def test_ranks_tell_their_attention_and_a_difference_is_named(
    tiny: Callable[[str], Path], gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny("qwen3")), ep_size=2, device="cpu", kernels="torch").resolved({})
    mine = introduce(open_rank(config, 0))
    assert mine.must_equal["attention"] == "sdpa"
    other = introduce(open_rank(config, 1))
    other.must_equal["attention"] = "vllm_flash_attn 2.6.2"
    assert differences(mine, other) == ["attention: rank 0 has 'sdpa', rank 1 has 'vllm_flash_attn 2.6.2'"]


def test_a_rank_that_cannot_have_what_the_setting_asks_for_does_not_start(tiny: Callable[[str], Path]) -> None:
    config = EngineConfig(model=str(tiny("qwen3")), device="cpu", attention_backend="flash").resolved({})
    with pytest.raises(ConfigError, match="attention_backend is 'flash', which cannot be had here: the device is cpu"):
        introduce(open_rank(config, 0))
    with pytest.raises(ConfigError, match="attention_backend is 'fast'; allowed are auto, native, sdpa, flash"):
        EngineConfig(model="m", attention_backend="fast")
