# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log probabilities against torch.log_softmax in fp64, with ranks and most likely tokens from a full sort."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.sampling.history import TokenHistory
from metrale_ray.sampling.logprobs import LOGPROB_FLOOR, TokenLogprobs
from metrale_ray.sampling.sampler import Sampled, SampleError, SampleRow, prompt_logprobs, sample
from metrale_ray.sampling.token_params import TokenParams
from tests.sampling.test_processors import LOGITS, large_rows

INF = math.inf


def check(found: TokenLogprobs, logits_V: torch.Tensor, num_top: int) -> None:
    expected_V = torch.log_softmax(logits_V.double(), 0).clamp(min=LOGPROB_FLOOR)
    order = logits_V.sort(descending=True, stable=True).indices.tolist()
    assert found.rank == order.index(found.token_id) + 1
    assert found.top_ids == tuple(order[:num_top])
    assert len(found.top_logprobs) == len(found.top_ids)
    for token_id, logprob in zip((found.token_id, *found.top_ids), (found.logprob, *found.top_logprobs), strict=True):
        assert logprob == pytest.approx(expected_V[token_id].item(), rel=1e-6, abs=1e-6)
        assert math.isfinite(logprob)


@given(LOGITS, st.integers(0, 20), st.data())
def test_a_score_is_the_log_softmax_of_the_raw_logits_and_always_finite(
    logits: list[float], num_top: int, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=3))
    logits_RV = torch.tensor([logits]).repeat(len(token_ids), 1)
    found = prompt_logprobs(logits_RV, token_ids, num_top)
    assert not isinstance(found, SampleError)
    assert [one.token_id for one in found] == token_ids
    for one, logits_V in zip(found, logits_RV, strict=True):
        check(one, logits_V, min(num_top, len(logits)))


def test_scores_over_a_large_vocabulary_agree_too() -> None:
    logits_RV = torch.from_numpy(np.stack(large_rows()))
    found = prompt_logprobs(logits_RV, [0, 1, 5000, 20_010, 77, 3, 20_009], 20)
    assert not isinstance(found, SampleError)
    for one, logits_V in zip(found, logits_RV, strict=True):
        check(one, logits_V, 20)


def test_what_the_model_excludes_scores_the_floor() -> None:
    found = prompt_logprobs(torch.tensor([[-INF, 0.0, -3e38]]), [0], 3)
    assert found == [TokenLogprobs(0, LOGPROB_FLOOR, 3, (1, 2, 0), (0.0, LOGPROB_FLOOR, LOGPROB_FLOOR))]
    assert "Infinity" not in json.dumps([found[0].logprob, *found[0].top_logprobs], allow_nan=False)


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 1},
        {"temperature": 1e-6},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"allowed_token_ids": (3, 4)},
        {"logit_bias": dict.fromkeys(range(0, 300, 2), -100)},
        {"bad_token_ids": [[token_id] for token_id in range(0, 300, 2)]},
    ],
    ids=str,
)
def test_no_parameter_changes_what_a_token_scores(values: dict[str, Any]) -> None:
    logits_RV = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)) * 4
    params = TokenParams(logprobs=5, **values)
    (found,) = sample(logits_RV, [SampleRow(params, 1, 0, 0, TokenHistory([1]))])
    assert isinstance(found, Sampled)
    assert found.logprobs is not None
    assert found.logprobs.token_id == found.token_id
    check(found.logprobs, logits_RV[0], 5)


def test_the_probabilities_of_all_tokens_sum_to_one() -> None:
    logits_V = torch.randn(20, generator=torch.Generator().manual_seed(4)) * 5
    (found,) = sample(logits_V[None], [SampleRow(TokenParams(logprobs=20), 1, 0, 0)])
    assert isinstance(found, Sampled)
    assert found.logprobs is not None
    assert math.fsum(map(math.exp, found.logprobs.top_logprobs)) == pytest.approx(1, abs=1e-6)


def test_logprobs_are_told_only_when_asked_for_and_zero_tells_the_token_alone() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits_RV, [SampleRow(TokenParams(temperature=0), 1, 0, 0)]) == [Sampled(1)]
    (found,) = sample(logits_RV, [SampleRow(TokenParams(temperature=0, logprobs=0), 1, 0, 0)])
    assert isinstance(found, Sampled)
    assert found.logprobs is not None
    assert (found.logprobs.rank, found.logprobs.top_ids, found.logprobs.top_logprobs) == (1, (), ())
    check(found.logprobs, logits_RV[0], 0)


def test_a_long_prompt_scores_row_by_row_as_each_row_does_alone() -> None:
    logits_RV = torch.randn(50, 1003, generator=torch.Generator().manual_seed(6)) * 3
    token_ids = torch.randint(1003, (50,), generator=torch.Generator().manual_seed(7)).tolist()
    found = prompt_logprobs(logits_RV, token_ids, 4)
    assert not isinstance(found, SampleError)
    assert found == [prompt_logprobs(logits_RV[i : i + 1].clone(), [token_ids[i]], 4)[0] for i in range(50)]  # type: ignore[index]
    strided_RV = logits_RV.repeat_interleave(2, dim=1)[:, ::2]
    assert prompt_logprobs(strided_RV, token_ids, 4) == found


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_prompt_with_a_row_that_is_not_finite_gives_an_error(bad: float) -> None:
    logits_RV = torch.zeros(20, 4)
    logits_RV[17, 2] = bad
    found = prompt_logprobs(logits_RV, [0] * 20, 1)
    assert isinstance(found, SampleError)
    assert found.code == "bad_logits"


def test_no_tokens_score_nothing_and_a_wrong_shape_is_refused() -> None:
    assert prompt_logprobs(torch.empty(0, 5), [], 3) == []
    with pytest.raises(ValueError, match="logits"):
        prompt_logprobs(torch.zeros(2, 5), [1], 3)
