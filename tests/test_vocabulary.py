# SPDX-License-Identifier: MIT OR Apache-2.0
"""Token ids that the model does not have, in every field that names tokens."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.vocabulary import check_vocabulary, within

VOCAB_SIZE = 320
FIELDS: dict[str, Any] = {
    "stop_token_ids": lambda token_id: {"stop_token_ids": [3, token_id]},
    "logit_bias": lambda token_id: {"logit_bias": {3: 1.0, token_id: -1.0}},
    "allowed_token_ids": lambda token_id: {"allowed_token_ids": [token_id, 3]},
    "bad_token_ids": lambda token_id: {"bad_token_ids": [[3], [4, token_id, 5]]},
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31, 2**32 - 1])
def test_an_id_outside_the_vocabulary_is_refused_by_field_value_and_range(name: str, token_id: int) -> None:
    with pytest.raises(RequestError, match=f"{name} holds {token_id}; token ids of this model are 0 to 319") as caught:
        check_vocabulary((1,), TokenParams(**FIELDS[name](token_id)), VOCAB_SIZE)
    assert (caught.value.param, caught.value.code) == (name, "invalid_request")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**63])
def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match=f"prompt_token_ids holds {token_id}; ") as caught:
        check_vocabulary((1, token_id, 2), TokenParams(), VOCAB_SIZE)
    assert caught.value.param == "prompt_token_ids"


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("token_id", [0, VOCAB_SIZE - 1])
def test_the_first_and_the_last_id_of_the_vocabulary_are_taken(name: str, token_id: int) -> None:
    check_vocabulary((0, VOCAB_SIZE - 1), TokenParams(**FIELDS[name](token_id)), VOCAB_SIZE)


def test_end_ids_outside_the_vocabulary_are_no_error_and_are_dropped() -> None:
    check_vocabulary((1,), TokenParams(end_token_ids=[5, VOCAB_SIZE]), VOCAB_SIZE)
    assert within([5, VOCAB_SIZE, VOCAB_SIZE - 1], VOCAB_SIZE) == {5, VOCAB_SIZE - 1}
