# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/limits.py`."""

from __future__ import annotations

import dataclasses

import pytest

from metrale_ray.errors import ConfigError
from tests.scheduler.scheduler_cases import ROOMY


@pytest.mark.parametrize(
    "name",
    [
        "max_batch_size",
        "max_model_len",
        "max_num_batched_tokens",
        "num_blocks",
        "block_size",
        "max_queue_len",
        "max_prompt_logits",
        "max_waiting_prompt_tokens",
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_count_that_is_not_a_positive_integer_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}; it must be an integer of at least 1"):
        dataclasses.replace(ROOMY, **{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_watermark_that_is_no_share_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="watermark"):
        dataclasses.replace(ROOMY, watermark=value)


def test_protection_may_be_off_but_not_negative() -> None:
    assert dataclasses.replace(ROOMY, resume_protection_tokens=0).resume_protection_tokens == 0
    with pytest.raises(ConfigError, match="resume_protection_tokens"):
        dataclasses.replace(ROOMY, resume_protection_tokens=-1)


def test_a_step_has_no_more_rows_than_slots_or_tokens() -> None:
    assert dataclasses.replace(ROOMY, max_batch_size=8, max_num_batched_tokens=3).max_rows == 3
    assert dataclasses.replace(ROOMY, max_batch_size=2, max_num_batched_tokens=3).max_rows == 2


def test_the_watermark_is_rounded_down_to_whole_blocks() -> None:
    assert dataclasses.replace(ROOMY, num_blocks=10, watermark=0.25).watermark_blocks == 2
