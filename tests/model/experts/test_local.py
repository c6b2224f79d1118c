# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fast form of a rank's experts against the plain one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from metrale_ray.model.experts.local import TorchExperts, plain_experts
from metrale_ray.model.experts.placement import experts_of

HIDDEN, INNER = 12, 10


def random_case(seed: int, num_tokens: int, num_experts: int, top: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, chosen = scores.topk(top)
    gate_up = torch.randn(num_experts, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(num_experts, HIDDEN, INNER, generator=generator)
    return x, chosen, weights, gate_up, down


@given(
    seed=st.integers(0, 10_000),
    num_tokens=st.integers(0, 9),
    num_experts=st.integers(1, 7),
    top=st.integers(1, 3),
    world=st.integers(1, 4),
)
def test_every_rank_adds_what_the_plain_form_adds(
    seed: int, num_tokens: int, num_experts: int, top: int, world: int
) -> None:
    x, chosen, weights, gate_up, down = random_case(seed, num_tokens, num_experts, min(top, num_experts))
    for rank in range(world):
        mine = experts_of(num_experts, rank, world)
        own = (gate_up[mine.start : mine.stop], down[mine.start : mine.stop])
        out = torch.zeros_like(x)
        experts = TorchExperts(mine, *own, functional.silu, functional.linear, num_experts)
        experts.write(out, x, chosen, weights)
        want = plain_experts(x, chosen, weights, mine, *own, functional.silu)
        assert torch.allclose(out, want, atol=1e-4, rtol=1e-4)
        experts.write(out, x, chosen, weights)
        chosen_twice = [2 * int((chosen == expert).sum()) for expert in range(num_experts)]
        assert experts.num_tokens_E.tolist() == chosen_twice  # of all ranks, on each


def test_experts_without_tokens_are_not_computed() -> None:
    x, _, weights, gate_up, down = random_case(0, 3, 6, 2)
    chosen = torch.tensor([[1, 4], [4, 1], [1, 5]])
    rows: list[int] = []

    def counting(rows_in: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(rows_in.shape[0])
        return functional.linear(rows_in, weight, bias)

    experts = TorchExperts(range(6), gate_up, down, functional.silu, counting, 6)
    experts.write(torch.zeros_like(x), x, chosen, weights)
    assert sorted(rows) == [1, 1, 2, 2, 3, 3]


def test_a_rank_whose_experts_are_not_chosen_leaves_the_payload_zero() -> None:
    x, _, weights, gate_up, down = random_case(0, 3, 6, 2)
    out = torch.zeros_like(x)
    experts = TorchExperts(range(4, 6), gate_up[4:], down[4:], functional.silu, functional.linear, 6)
    experts.write(out, x, torch.tensor([[0, 1], [2, 3], [3, 0]]), weights)
    assert not out.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_sums_are_rounded_once(dtype: torch.dtype) -> None:
    x, chosen, weights, gate_up, down = random_case(1, 5, 4, 3)
    narrow = [tensor.to(dtype) for tensor in (x, gate_up, down)]
    out = torch.zeros_like(narrow[0])
    TorchExperts(range(4), narrow[1], narrow[2], functional.silu, functional.linear, 4).write(
        out, narrow[0], chosen, weights
    )
    want = plain_experts(*[t.float() for t in narrow[:1]], chosen, weights, range(4), *[t.float() for t in narrow[1:]],
                         functional.silu)  # fmt: skip
    assert (out.float() - want).abs().max() < 0.02 * want.abs().max()
