# SPDX-License-Identifier: MIT OR Apache-2.0
"""The perplexity of the demo's model with weights in 8 bits."""

from __future__ import annotations

import pytest

from bench.quality import compare
from metrale_ray.demo import ensure_demo_checkpoint


@pytest.mark.nightly
def test_int8_changes_the_perplexity_of_the_demos_model_by_less_than_half_a_percent() -> None:
    found = compare(ensure_demo_checkpoint(), num_tokens=4096)
    assert found.num_tokens > 4000
    assert abs(found.relative_change) < 0.005, found
