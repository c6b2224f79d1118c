# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import pytest
import torch

from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.experts.router import route


def moe(normalize: bool, round_weights: bool = False, top: int = 2) -> MoeConfig:
    return MoeConfig(4, top, 8, normalize, round_weights)


def test_weights_are_those_of_a_softmax_over_all_experts() -> None:
    chosen, weights = route(torch.tensor([[2.0, 1.0, 0.5, -1.0]]), moe(normalize=False))
    assert chosen.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([0.6095, 0.2242], abs=1e-4)


def test_normalised_weights_sum_to_one() -> None:
    _, weights = route(torch.tensor([[2.0, 1.0, 0.5, -1.0]]), moe(normalize=True))
    assert weights[0].tolist() == pytest.approx([0.7311, 0.2689], abs=1e-4)


def test_ties_go_to_the_lower_expert() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 3.0, 3.0, 3.0], [3.0, 1.0, 3.0, 1.0]])
    chosen, _ = route(scores, moe(normalize=True, top=3))
    assert chosen.tolist() == [[0, 1, 2], [1, 2, 3], [0, 2, 1]]


def test_weights_are_fp32_and_rounded_only_where_the_family_rounds() -> None:
    scores = torch.tensor([[0.3, 0.1, 0.2, 0.0]], dtype=torch.bfloat16)
    _, exact = route(scores, moe(normalize=True))
    _, rounded = route(scores, moe(normalize=True, round_weights=True))
    assert exact.dtype == rounded.dtype == torch.float32
    assert torch.equal(rounded, exact.to(torch.bfloat16).float())
    assert not torch.equal(rounded, exact)


def test_no_tokens_are_routed_nowhere() -> None:
    chosen, weights = route(torch.empty(0, 4), moe(normalize=True))
    assert chosen.shape == weights.shape == (0, 2)
