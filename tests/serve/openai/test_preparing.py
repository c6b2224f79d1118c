# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where prompts and parameters are prepared, and how much may go to the engine for one call."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.protocol.front import params_map
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.token_params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_SEQUENCE_TOKENS, TokenParams
from metrale_ray.serve.openai.preparing import MAX_PARAMS_BYTES, MAX_PROMPT_CANDIDATES, prepared
from metrale_ray.serve.prompts import Preparation, Prompt, PromptRequest
from metrale_ray.serve.stop_strings import StopAutomaton
from tests.serve.openai.played import Played

PIECES = ["a", "b", "c"]


def prepare(prompts: list[Prompt], **params: Any) -> list[PromptRequest]:
    """As a service does."""
    played = Played(PIECES)
    return asyncio.run(prepared(played.call(), played.backend.front(), prompts, SamplingParams(**params), 0))


@pytest.mark.parametrize(
    ("prompts", "params", "is_on_loop"),
    [
        ([[0]], {}, True),
        (["a" * 99], {"stop": ["a", "b"], "bad_words": ["a"], "logit_bias": {0: 1.0}}, True),
        ([[0] * 98] * 30, {}, True),
        ([[0] * 98] * 60, {}, False),
        (["a"] * 100, {}, False),  # each is little, and there are many
        ([[0]], {"bad_words": ["a"] * 20}, False),
        ([[0]], {"stop": ["a" * 250] * 4}, False),
        ([[0]], {"allowed_token_ids": [0] * 5000}, False),
        ([[0]], {"logit_bias": dict.fromkeys(range(49), 1.0), "bad_token_ids": [[0] * 64] * 64}, False),
        ([[0]], {"grammar": "g" * 5000}, False),
    ],
)
def test_what_takes_long_is_prepared_in_a_thread(
    prompts: list[Prompt], params: dict[str, Any], is_on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    requests = Preparation.requests

    def seen(self: Preparation, *given: Any) -> list[PromptRequest]:
        threads.append(threading.get_ident())
        return requests(self, *given)

    monkeypatch.setattr(Preparation, "requests", seen)
    assert len(prepare(prompts, **params)) == len(prompts)
    assert [thread == threading.get_ident() for thread in threads] == [is_on_loop]


def test_parameters_are_packed_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[TokenParams] = []
    pack = params_map.params_to_map

    def counted(params: TokenParams) -> dict[str, Any]:
        packed.append(params)
        return pack(params)

    monkeypatch.setattr(params_map, "params_to_map", counted)
    requests = prepare([[0]] * 200, allowed_token_ids=[0] * 1000, stop="a")
    assert len(packed) == 1
    assert {id(request.sent) for request in requests} == {id(requests[0].sent)}
    assert {id(request.stops) for request in requests} == {id(requests[0].stops)}
    assert isinstance(requests[0].stops, StopAutomaton)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"allowed_token_ids": [0] * MAX_ALLOWED_TOKEN_IDS}, "allowed_token_ids"),
        ({"bad_token_ids": [[0] * MAX_BAD_SEQUENCE_TOKENS] * 2000}, "bad_words"),
        ({"grammar": "\U0001f600" * 2**17}, "grammar"),
    ],
)
def test_parameters_that_are_too_much_for_so_many_prompts_are_refused(params: dict[str, Any], name: str) -> None:
    (one,) = prepare([[0]], **params)
    most = MAX_PARAMS_BYTES // one.sent.num_bytes
    assert len(prepare([[0]] * most, **params)) == most
    with pytest.raises(RequestError) as caught:
        prepare([[0]] * (most + 1), **params)
    error = caught.value
    assert (error.code, error.param) == ("limit_exceeded", name)
    assert error.message == (
        f"{name} is sent to the engine with each of the {most + 1} prompts, and the parameters of this call take "
        f"{one.sent.num_bytes * (most + 1)} bytes then; allowed are {MAX_PARAMS_BYTES}. Give fewer prompts at a time, "
        f"or a shorter {name}."
    )


def test_scores_of_prompts_that_no_answer_should_hold_are_refused_by_name() -> None:
    allowed = MAX_PROMPT_CANDIDATES // (90 * 21)
    prompts: list[Prompt] = [[0] * 90 for _ in range(allowed + 1)]
    assert len(prepare(prompts[:allowed], prompt_logprobs=20)) == allowed
    assert len(prepare(prompts, prompt_logprobs=0)) == allowed + 1
    with pytest.raises(RequestError, match=r"log probabilities of .* tokens of prompts are .* entries") as refused:
        prepare(prompts, prompt_logprobs=20)
    assert (refused.value.code, refused.value.param) == ("limit_exceeded", "prompt_logprobs")
