# SPDX-License-Identifier: MIT OR Apache-2.0
"""Adapters are chosen by signature alone, and what they pass binds to the real one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from metrale_ray.model.attention.flash_adapter import BY_LENGTH, BY_START, Adapter, FlashKernel, adapter_for
from metrale_ray.model.attention.flash_plan import FlashPlan, plan_flash
from tests.fixtures.flash import by_length, by_start
from tests.fixtures.group import CPU
from tests.model.attention.test_sdpa import random_step

BLOCK_SIZE = 16


def plan(window: int | None = None) -> FlashPlan:
    spans, seqs, cache = random_step([(20, 1), (0, 5)], 0, BLOCK_SIZE)
    return plan_flash(spans, seqs, cache, window, CPU)


def bound(adapter: Adapter, function: Callable[..., Any], window: int | None = None) -> dict[str, Any]:
    """The arguments as the function's own signature names them."""
    seen: dict[str, Any] = {}

    def spy(**arguments: Any) -> torch.Tensor:
        seen.update(inspect.signature(function).bind(**arguments).arguments)
        return arguments["q"]

    tensor = torch.zeros(6, 4, 8)
    assert FlashKernel("a spy", spy, adapter).attend(tensor, tensor, tensor, plan(window)) is tensor
    return seen


@pytest.mark.parametrize(("function", "adapter"), [(by_length, BY_LENGTH), (by_start, BY_START)])
def test_the_adapter_is_the_one_that_the_signature_asks_for(function: Callable[..., Any], adapter: Adapter) -> None:
    assert adapter_for(function) is adapter


def test_lengths_go_by_the_name_that_each_signature_knows() -> None:
    lengths, starts = bound(BY_LENGTH, by_length), bound(BY_START, by_start)
    assert lengths["seqused_k"].tolist() == [21, 5]
    assert "cu_seqlens_k" not in lengths
    assert lengths["fa_version"] == 2
    assert starts["cu_seqlens_k"].tolist() == [0, 21, 26]
    for arguments in (lengths, starts):
        assert arguments["cu_seqlens_q"].tolist() == [0, 1, 6]
        assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"], arguments["causal"]) == (5, 21, True)
        assert arguments["block_table"].shape == (2, 16)


def test_a_window_counts_the_token_itself_and_minus_one_means_all() -> None:
    assert bound(BY_LENGTH, by_length)["window_size"] == [-1, -1]
    assert bound(BY_LENGTH, by_length, 1)["window_size"] == [0, 0]
    assert bound(BY_START, by_start)["window_size"] == (-1, -1)
    assert bound(BY_START, by_start, 8)["window_size"] == (7, 0)


def test_an_unknown_signature_has_no_adapter() -> None:
    def without_blocks(q: Any, k: Any, v: Any, cu_seqlens_q: Any, max_seqlen_q: Any, causal: Any = False) -> None: ...

    def needs_more(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, *rest: Any
    ) -> None: ...

    for function in (without_blocks, needs_more):
        assert adapter_for(function) is None
