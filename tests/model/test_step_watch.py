# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is kept of a watched step: the last row of each span, in span order, and every bit of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from metrale_ray.model.step_watch import StepWatch, hash_tensors
from metrale_ray.protocol.commands import Logits
from tests.fixtures.group import Group

CPU = torch.device("cpu")


def routing(num_rows: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return torch.randint(0, 8, (num_rows, 2), generator=generator), torch.rand(num_rows, 2, generator=generator)


def watched(rows: list[int], num_rows: int) -> tuple[StepWatch, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A watch of a step of `num_rows`, and what it was told."""
    watch, layers = StepWatch(rows, CPU), [routing(num_rows, layer) for layer in range(3)]
    x_TH = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(9))
    for chosen_TK, weights_TK in layers:
        watch.note_routing(chosen_TK, weights_TK)
    watch.note_residual(x_TH)
    return watch, x_TH, layers


@pytest.mark.parametrize("rows", [[4], [6, 1], [2, 0, 1], [0, 1, 2]])
def test_only_the_rows_asked_for_count_and_they_come_in_the_order_of_the_spans(rows: list[int]) -> None:
    num_rows = 3 if len(rows) == 3 else 7
    watch, x_TH, layers = watched(rows, num_rows)
    chosen = torch.stack([chosen_TK[rows] for chosen_TK, _ in layers]).to(torch.int32)
    weights = torch.stack([weights_TK[rows] for _, weights_TK in layers])
    assert watch.witness() == {"residual": hash_tensors([x_TH[rows]]), "routing": hash_tensors([chosen, weights])}


def test_a_step_without_experts_shows_no_routing() -> None:
    watch = StepWatch([0], CPU)
    watch.note_residual(torch.zeros(1, 4))
    assert set(watch.witness()) == {"residual"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_bit_of_a_hidden_state_shows(dtype: torch.dtype) -> None:
    x_RH = torch.ones(3, 5, dtype=dtype)
    before = hash_tensors([x_RH])
    x_RH.view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)[-1] ^= 1
    assert hash_tensors([x_RH]) != before


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_of_a_model_show_the_same_and_only_when_watched(tiny: Callable[[str], Path], world: int) -> None:
    group = Group(tiny("qwen3"), world)
    group.prompt(0, [5, 6, 7])
    assert [model.witness_of_step() for model in group.models] == [{}] * world
    for model in group.models:
        model.watch_step(True)
    group.step((0, [9], Logits.LAST), (1, [1, 2, 3, 4], Logits.NONE))
    (one, *others) = [model.witness_of_step() for model in group.models]
    assert set(one) == {"residual", "routing"}
    assert all(other == one for other in others)
    group.models[0].watch_step(False)
    assert group.models[0].witness_of_step() == {}
