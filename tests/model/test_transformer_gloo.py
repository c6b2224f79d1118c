# SPDX-License-Identifier: MIT OR Apache-2.0
"""Logits over processes joined by gloo, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo_rig import Ranks
from tests.model.gloo_logits import CHUNKS, LENGTHS, logits_of_prompts, prompt

pytestmark = pytest.mark.gloo

MAX_DIFFERENCE = 1e-4
NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("variant", "world"),
    [
        ("mixtral", 2),
        ("qwen3", 3),
        ("mixtral", 4),
        ("llama", 2),  # has no experts: its group is joined and left without one reduction
        pytest.param("mixtral", 3, marks=NIGHTLY),
        pytest.param("qwen3", 2, marks=NIGHTLY),
        pytest.param("qwen3", 4, marks=NIGHTLY),
    ],
)
def test_logits_over_gloo_equal_the_reference(
    variant: str, world: int, tiny: Callable[[str], Path], tiny_reference: Callable[[str], Any]
) -> None:
    with Ranks(world, logits_of_prompts, str(tiny(variant)), world) as ranks:
        results = ranks.results()
    assert all(set(map(type, other)) == {type(None)} for other in results[1:])
    found = iter(results[0])
    with torch.inference_mode():
        for length in LENGTHS:
            expected = tiny_reference(variant)(torch.tensor([prompt(length)])).logits[0]
            for _ in CHUNKS:
                assert (torch.tensor(next(found)) - expected).abs().max() <= MAX_DIFFERENCE
