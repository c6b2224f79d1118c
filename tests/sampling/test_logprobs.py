# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a front may import of this folder must not bring PyTorch along, which it never needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from metrale_ray.sampling.logprobs import LOGPROB_FLOOR, TokenLogprobs


@pytest.mark.parametrize("module", ["logprobs", "params", "token_params"])
def test_a_front_can_import_it_without_torch(module: str) -> None:
    program = f"import sys, metrale_ray.sampling.{module}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


def test_log_probabilities_are_plain_values_that_compare() -> None:
    assert TokenLogprobs(3, -0.5, 1) == TokenLogprobs(3, -0.5, 1, (), ())
    assert TokenLogprobs(3, -0.5, 1) != TokenLogprobs(3, LOGPROB_FLOOR, 1)
