# SPDX-License-Identifier: MIT OR Apache-2.0
"""From one step's logits to tokens and log probabilities, against plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from metrale_ray.live import LiveRequest
from metrale_ray.protocol.commands import Logits, Slot, Span
from metrale_ray.readout import read_out
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import RequestId

VOCAB_SIZE = 11
PROMPT = (1, 2, 3, 4, 5, 6)


def a_row(number: int, start: int, end: int, logits: Logits, samples: bool) -> PlanRow:
    tokens = (*PROMPT, 7, 8, 9)[start:end]
    return PlanRow(RequestId(number), Span(Slot(number), start, tokens, (), logits), samples)


def live(**params: TokenParams) -> dict[RequestId, LiveRequest]:
    found = {}
    for name, each in params.items():
        found[RequestId(int(name[1:]))] = LiveRequest(PROMPT, each, 1, 0, frozenset())
    return found


def logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows)) * 3


GREEDY = TokenParams(temperature=0)
SCORED = TokenParams(temperature=0, prompt_logprobs=2)
# A chunk without logits, a decode row, a middle chunk and a last chunk of prompts whose logits are wanted.
ROWS = (
    a_row(0, 0, 3, Logits.NONE, False),
    a_row(1, 6, 7, Logits.LAST, True),
    a_row(2, 1, 4, Logits.ALL, False),
    a_row(3, 2, 6, Logits.ALL, True),
)


def test_each_row_is_read_from_its_own_logits() -> None:
    logits_RV = logits(8)
    readout = read_out(logits_RV, ROWS, live(r0=SCORED, r1=GREEDY, r2=SCORED, r3=SCORED))
    best = logits_RV.argmax(dim=1).tolist()
    assert {number: each.token_id for number, each in readout.sampled.items()} == {1: best[0], 3: best[7]}
    assert readout.errors == {}
    expected = torch.log_softmax(logits_RV.double(), dim=1)
    told = {number: [(each.token_id, each.logprob) for each in some] for number, some in readout.prompt.items()}
    assert set(told) == {2, 3}
    for number, first, scored in ((2, 1, (3, 4, 5)), (3, 4, (4, 5, 6))):
        assert [token_id for token_id, _ in told[RequestId(number)]] == list(scored)
        for row, (token_id, logprob) in enumerate(told[RequestId(number)], start=first):
            assert logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
    assert [len(each.top_ids) for each in readout.prompt[RequestId(2)]] == [2, 2, 2]


def test_what_has_ended_meanwhile_is_passed_over() -> None:
    readout = read_out(logits(8), ROWS, live(r1=GREEDY))
    assert set(readout.sampled) == {1}
    assert readout.prompt == {}


def test_a_step_without_logits_gives_nothing() -> None:
    readout = read_out(None, ROWS[:1], live(r0=GREEDY))
    assert (readout.sampled, readout.prompt, readout.errors) == ({}, {}, {})


def test_the_last_token_of_a_prompt_alone_scores_nothing_and_samples() -> None:
    readout = read_out(logits(1), (a_row(3, 5, 6, Logits.ALL, True),), live(r3=SCORED))
    assert readout.prompt == {}
    assert set(readout.sampled) == {3}


@pytest.mark.parametrize(("broken", "number"), [(0, 1), (2, 2), (5, 3), (7, 3)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_cost_their_own_request_alone(broken: int, number: int, value: float) -> None:
    logits_RV = logits(8)
    whole = read_out(logits_RV.clone(), ROWS, live(r1=GREEDY, r2=SCORED, r3=SCORED))
    logits_RV[broken, 4] = value
    readout = read_out(logits_RV, ROWS, live(r1=GREEDY, r2=SCORED, r3=SCORED))
    assert {key: error.code for key, error in readout.errors.items()} == {number: "bad_logits"}
    assert number not in readout.sampled

    def others(found: dict[RequestId, Any]) -> dict[RequestId, Any]:
        return {key: value for key, value in found.items() if key != number}

    assert others(readout.sampled) == others(whole.sampled)
    assert others(readout.prompt) == others(whole.prompt)
