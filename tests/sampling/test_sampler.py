# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sampler against a plain reference, alone and in batches, and against the distribution itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from metrale_ray.sampling.history import TokenHistory
from metrale_ray.sampling.prepared import prepared
from metrale_ray.sampling.sampler import Sampled, SampleError, SampleRow, _sample_from_device, sample
from metrale_ray.sampling.token_params import TokenParams
from tests.sampling.reference import Past, Undecided, candidate_weights, choose
from tests.sampling.test_processors import LOGITS

INF = math.inf


def row(position: int = 0, *, seed: int = 1, sequence_index: int = 0, **params: Any) -> SampleRow:
    return SampleRow(TokenParams(**params), seed, sequence_index, position)


def tokens(results: Iterable[Sampled | SampleError]) -> list[int | SampleError]:
    return [result.token_id if isinstance(result, Sampled) else result for result in results]


def sampled(logits_RV: torch.Tensor, rows: list[SampleRow]) -> list[int | SampleError]:
    return tokens(sample(logits_RV, rows))


def row_of(params: TokenParams, past: Past) -> SampleRow:
    """The row as the engine makes it."""
    history = None
    if params.needs_history:
        history = TokenHistory(past.prompt)
        for token_id in past.output:
            history.append(token_id)
    return SampleRow(
        params, past.seed, past.sequence_index, past.position, history, len(past.output), past.end_token_ids
    )


@st.composite
def cases(draw: st.DrawFn, vocab_size: int) -> tuple[TokenParams, Past]:
    """Parameters of every kind, and a past that meets them, over a small vocabulary."""
    token = st.integers(0, vocab_size - 1)
    few = st.lists(token, max_size=6)
    output = draw(st.lists(token, max_size=8))
    # Bad sequences whose beginning is the output's end are likely this way.
    endings = [[*output[len(output) - n :], draw(token)] for n in range(len(output) + 1)]
    bad = draw(st.lists(st.one_of(st.sampled_from(endings), st.lists(token, min_size=1, max_size=3)), max_size=3))
    some = lambda value: st.one_of(st.just(value[0]), value[1])  # noqa: E731
    params = TokenParams(
        temperature=draw(st.one_of(st.sampled_from([0.0, 0.7, 1.0, 100.0]), st.floats(0.01, 5))),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3, 10, 10**6])),
        top_p=draw(st.one_of(st.sampled_from([1.0, 1.0, 0.9, 0.37]), st.floats(1e-300, 1.0))),
        min_p=draw(st.one_of(st.sampled_from([0.0, 0.0, 0.05, 1.0]), st.floats(0, 1))),
        min_tokens=draw(st.integers(0, 10)),
        repetition_penalty=draw(some((1.0, st.one_of(st.floats(0.5, 2), st.floats(5e-324, 100))))),
        presence_penalty=draw(some((0.0, st.floats(-2, 2)))),
        frequency_penalty=draw(some((0.0, st.floats(-2, 2)))),
        logit_bias=draw(some(({}, st.dictionaries(token, st.floats(-100, 100), max_size=4)))),
        allowed_token_ids=draw(some((None, st.lists(token, min_size=1, max_size=10)))),
        bad_token_ids=bad,
    )
    past = Past(
        prompt=tuple(draw(few)),
        output=tuple(output),
        end_token_ids=frozenset(draw(few)),
        seed=draw(st.integers(0, 2**64 - 1)),
        sequence_index=draw(st.integers(0, 3)),
        position=draw(st.integers(0, 2**40)),
    )
    return params, past


@given(LOGITS, st.data())
def test_a_token_is_the_one_that_the_plain_reference_takes(logits: list[float], data: st.DataObject) -> None:
    params, past = data.draw(cases(len(logits)))
    try:
        expected = choose(logits, params, past)
    except Undecided:
        reject()
    (found,) = sampled(torch.tensor([logits]), [row_of(params, past)])
    if expected is None:
        assert isinstance(found, SampleError)
        assert found.code == "no_token_left"
    else:
        assert found == expected


PLAIN: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 100.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 1.7},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"logit_bias": {token_id: (token_id % 7) * 1.5 - 4 for token_id in range(0, 100, 3)}},
    {"logit_bias": {5: 100}},
    {"allowed_token_ids": tuple(range(10, 40))},
    {"allowed_token_ids": (99,)},
    {"bad_token_ids": [[token_id] for token_id in range(70)]},
    {"bad_token_ids": [[9, token_id] for token_id in range(80)] + [[8, 9, token_id] for token_id in range(80, 97)]},
    {"min_tokens": 16},
    {"min_p": 0.2},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.8},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("values", PLAIN, ids=[" ".join(values) for values in PLAIN])
def test_each_parameter_does_what_the_plain_reference_does(values: dict[str, Any], temperature: float) -> None:
    generator = torch.Generator().manual_seed(11)
    params = TokenParams(temperature=temperature, **values)
    ends = frozenset(range(0, 100, 2))
    num_changed = 0
    for position in range(12):
        logits_V = torch.randn(100, generator=generator) * 3
        likely = logits_V.topk(30).indices.tolist()[position % 2 :: 2]  # with the largest, or without it
        past = Past(tuple(likely[::3]), (*likely[::2], 8, 9), ends, seed=3, position=position)
        try:
            expected = choose(logits_V.tolist(), params, past)
        except Undecided:
            continue
        assert sampled(logits_V[None], [row_of(params, past)]) == [expected]
        num_changed += expected != choose(logits_V.tolist(), TokenParams(temperature=temperature), past)
    if temperature or "min_p" not in values:
        assert num_changed > 0, "the parameter has changed no token, so the test tells nothing"


@given(st.data())
def test_a_row_gives_the_same_alone_and_at_any_place_of_any_batch(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 70))
    batch = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits_RV = torch.randn(batch, vocab_size, generator=generator) * 3
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 3, "logprobs": 2}, {"top_p": 0.5, "min_p": 0.1}]
    rows = [row(position, **data.draw(st.sampled_from(kinds))) for position in range(batch - 1)]
    params, past = data.draw(cases(vocab_size))
    rows.append(row_of(replace(params, logprobs=data.draw(st.sampled_from([None, 0, 5]))), past))
    together = sample(logits_RV, rows)
    alone = [sample(logits_RV[r : r + 1].clone(), [rows[r]])[0] for r in range(batch)]
    order = data.draw(st.permutations(range(batch)))
    shuffled = sample(logits_RV[list(order)], [rows[r] for r in order])
    assert together == alone
    assert shuffled == [together[r] for r in order]


EVERY_KIND: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 0.7, "top_p": 0.99, "logprobs": 0},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "logprobs": 5},
    {"min_p": 1e-4},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"presence_penalty": -1.0, "logit_bias": {7: 5.0}, "top_p": 0.5},
    {"allowed_token_ids": tuple(range(0, 1000, 5))},
    {"bad_token_ids": ((1,), (2, 3)), "temperature": 0.0},
    {"min_tokens": 10, "temperature": 2.0},
]


def test_a_row_among_sixteen_others_over_a_large_vocabulary_gives_what_it_gives_alone() -> None:
    generator = torch.Generator().manual_seed(9)
    logits_RV = torch.randn(17, 32_003, generator=generator)  # odd, so that rows start at every alignment
    past = Past(prompt=tuple(range(100)), output=(2, 5, 5, 2), end_token_ids=frozenset({2, 9}))
    rows = [row_of(TokenParams(**EVERY_KIND[r % 12]), replace(past, position=r)) for r in range(17)]
    together = sample(logits_RV, rows)
    assert together == [sample(logits_RV[r : r + 1].clone(), [rows[r]])[0] for r in range(17)]
    assert together == sample(logits_RV.repeat_interleave(2, dim=1)[:, ::2], rows)
    assert together[::-1] == sample(logits_RV.flip(0), rows[::-1])


def test_the_number_of_threads_changes_no_bit() -> None:
    logits_RV = torch.randn(12, 100_003, generator=torch.Generator().manual_seed(10)) * 2
    rows = [row_of(TokenParams(**{"logprobs": 3} | values), Past(prompt=(1, 2))) for values in EVERY_KIND]
    num_threads = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(sample(logits_RV, rows))
    torch.set_num_threads(num_threads)
    assert found[0] == found[1] == found[2]


def test_rows_on_a_device_are_fetched_only_when_needed_and_give_the_same() -> None:
    logits_RV = torch.randn(12, 1000, generator=torch.Generator().manual_seed(12)) * 2
    rows = [row_of(TokenParams(**values), Past(prompt=(1, 2), position=5)) for values in EVERY_KIND]
    assert _sample_from_device(logits_RV, rows) == sample(logits_RV, rows)
    logits_RV[[1, 5], 3] = math.nan
    bad = SampleError("bad_logits", "the logits of position 5 are not finite numbers")
    assert _sample_from_device(logits_RV, rows) == sample(logits_RV, rows)
    assert [r for r, result in enumerate(_sample_from_device(logits_RV, rows)) if result == bad] == [1, 5]


def test_parameters_that_change_nothing_cost_nothing() -> None:
    idle = TokenParams(repetition_penalty=1.0, presence_penalty=-0.0, logit_bias={3: 0.0}, min_tokens=4)
    assert not prepared(idle).changes_logits
    assert not idle.needs_history
    assert prepared(idle) is prepared(idle), "what is known of the parameters is made once"
    busy: list[dict[str, Any]] = [
        {"presence_penalty": 0.1},
        {"logit_bias": {3: 0.1}},
        {"allowed_token_ids": [1]},
        {"bad_token_ids": [[1]]},
        {"bad_token_ids": [[1, 2]]},
    ]
    assert all(prepared(TokenParams(**values)).changes_logits for values in busy)


def test_the_end_is_not_chosen_before_min_tokens_and_is_chosen_then() -> None:
    logits_RV = torch.tensor([[0.0, 9.0, 5.0, 1.0]])
    params = TokenParams(temperature=0, min_tokens=2)
    ends = frozenset({1, 2, 4, 2**32 - 1})  # the last two are not in the vocabulary
    early, due = [SampleRow(params, 1, 0, 9, None, generated, ends) for generated in (1, 2)]
    assert sampled(logits_RV, [early]) == [3]
    assert sampled(logits_RV, [due]) == [1]


def test_a_bad_sequence_counts_what_was_generated_and_never_the_prompt() -> None:
    params = TokenParams(temperature=0, bad_token_ids=[[5, 6, 1]])
    logits_RV = torch.tensor([[0.0, 9.0, 5.0, 1.0]])
    histories = [TokenHistory(prompt) for prompt in ((5, 6), (5,), (), ())]
    for history, output in zip(histories, ((), (6,), (5, 6), (5, 6, 7)), strict=True):
        for token_id in output:
            history.append(token_id)
    rows = [SampleRow(params, 1, 0, 2, history) for history in histories]
    assert sampled(logits_RV.expand(4, -1), rows) == [1, 1, 2, 1]


def test_a_bias_comes_before_the_penalties() -> None:
    params = TokenParams(temperature=0, logit_bias={0: 4.0}, repetition_penalty=2.0)
    one = row_of(params, Past(prompt=(0,)))
    # (-1 + 4) / 2 is 1.5; the other way round it would be -1 * 2 + 4, which is 2.
    assert sampled(torch.tensor([[-1.0, 1.75]]), [one]) == [1]
    assert sampled(torch.tensor([[-1.0, 1.25]]), [one]) == [0]


def test_a_penalty_leaves_a_masked_token_masked_and_makes_none_certain() -> None:
    logits_RV = torch.tensor([[-INF, 3.4e38, 3.4e38, -3.4e38]])
    for penalty in (5e-324, 1e-40, 0.5, 2.0, 100.0):
        params = TokenParams(repetition_penalty=penalty, frequency_penalty=2.0)
        rows = [row_of(params, Past(prompt=(0, 1, 2, 3), position=position)) for position in range(40)]
        assert set(sampled(logits_RV.expand(40, -1), rows)) == {1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_no_token_is_left_fails_alone(temperature: float) -> None:
    logits_RV = torch.tensor([[0.5, -INF, 4.0]]).repeat(3, 1)
    masks: dict[str, Any] = {"allowed_token_ids": [1, 2], "bad_token_ids": [[2]], "logit_bias": {1: 100}}
    good = row(temperature=temperature)
    none_left = row_of(TokenParams(temperature=temperature, logprobs=3, **masks), Past(position=7))
    results = sample(logits_RV, [good, none_left, good])
    assert results[1] == SampleError("no_token_left", "the parameters forbid every token at position 7")
    assert [results[0], results[2]] == sample(logits_RV[:2], [good, good])


def test_a_row_that_lacks_its_history_is_refused() -> None:
    with pytest.raises(ValueError, match="position 3 has penalties or bad sequences and no history"):
        sample(torch.zeros(1, 4), [row(3, presence_penalty=0.5)])


def test_greedy_takes_the_first_index_on_a_tie() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-INF, -INF, -0.0, 0.0]])
    assert sampled(logits_RV, [row(temperature=0)] * 3) == [1, 0, 2]


def test_top_k_of_one_and_a_tiny_top_p_are_the_greedy_choice_on_ties_too() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).repeat(100, 1)
    assert sampled(logits_RV, [row(p, top_k=1) for p in range(100)]) == [1] * 100
    assert sampled(logits_RV, [row(p, top_p=1e-300) for p in range(100)]) == [1] * 100


def test_a_temperature_too_small_for_fp32_is_the_greedy_choice() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 2.0]])
    assert sampled(logits_RV, [row(temperature=1e-320)]) == [1]
    assert sampled(logits_RV, [row(temperature=2.0**-126)]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[math.nan, 1.0, 2.0], [1.0, 2.0, math.nan], [-INF, math.nan, -INF], [-INF] * 3, [0.0, INF, 1.0]]
)
def test_a_row_that_is_not_finite_fails_alone(bad: list[float], temperature: float) -> None:
    good = [0.5, -INF, 4.0]
    rows = [row(p, temperature=temperature) for p in range(3)]
    results = sample(torch.tensor([good, bad, good]), rows)
    expected = sample(torch.tensor([good, good]), [rows[0], rows[2]])
    assert [results[0], results[2]] == expected
    assert results[1] == SampleError("bad_logits", "the logits of position 1 are not finite numbers")
    assert str(results[1]) == "the logits of position 1 are not finite numbers"


def test_a_masked_token_is_never_drawn() -> None:
    logits_RV = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]]).repeat(200, 1)
    assert set(sampled(logits_RV, [row(p, temperature=100.0) for p in range(200)])) == {1, 3}


def test_huge_logits_do_not_overflow() -> None:
    logits_RV = torch.tensor([[3.4e38, -3.4e38, 3.4e38]]).repeat(50, 1)
    assert set(sampled(logits_RV, [row(p) for p in range(50)])) == {0, 2}


def test_the_logits_are_left_as_they_were() -> None:
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    before = logits_RV.clone()
    sample(logits_RV, [row(p, top_k=5, top_p=0.5, temperature=t) for p, t in enumerate((0.0, 0.5, 2.0))])
    assert torch.equal(before, logits_RV)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []


@pytest.mark.parametrize(
    ("logits_RV", "num_rows"),
    [
        (torch.zeros(2, 4), 1),
        (torch.zeros(4), 4),
        (torch.zeros(1, 0), 1),
        (torch.zeros(1, 4, dtype=torch.bfloat16), 1),
        (torch.zeros(1, 4, dtype=torch.float64), 1),
    ],
)
def test_logits_of_a_wrong_shape_or_dtype_are_refused(logits_RV: torch.Tensor, num_rows: int) -> None:
    with pytest.raises(ValueError, match="logits"):
        sample(logits_RV, [row()] * num_rows)


@pytest.mark.parametrize(
    "params",
    [
        TokenParams(),
        TokenParams(temperature=0.6),
        TokenParams(temperature=1.7, top_k=7),
        TokenParams(top_p=0.8),
        TokenParams(temperature=1.3, top_k=9, top_p=0.9),
    ],
    ids=str,
)
def test_the_tokens_follow_the_distribution(params: TokenParams, scale: int) -> None:
    num_draws = 2_000 * scale
    logits = [0.3 * i - 0.02 * i * i for i in range(12)]
    weight = candidate_weights(torch.tensor(logits), params)
    counts = dict.fromkeys(weight, 0)
    logits_RV = torch.tensor([logits]).expand(num_draws, -1)
    for token in sampled(logits_RV, [SampleRow(params, 77, 0, position) for position in range(num_draws)]):
        counts[token] += 1  # type: ignore[index]  # a SampleError or a token that was cut fails here
    total = sum(weight.values())
    chi_square = sum((counts[i] - num_draws * w / total) ** 2 / (num_draws * w / total) for i, w in weight.items())
    freedom = len(weight) - 1
    assert freedom >= 4
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def masked(allowed: Iterable[int], size: int = 6, **fields: Any) -> SampleRow:
    mask = np.zeros(size, dtype=np.bool_)
    mask[list(allowed)] = True
    params = TokenParams(**{"temperature": 0, **fields.pop("params", {})})
    return SampleRow(params, 1, 0, 0, mask=mask, end_token_ids=frozenset({5}), **fields)


def test_a_grammar_allows_its_tokens_alone_and_its_row_alone_is_changed() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 3)
    rows = [masked([1, 3]), row(temperature=0), masked([0], params={"temperature": 2.0})]
    assert sampled(logits_RV, rows) == [3, 5, 0]
    assert tokens(_sample_from_device(logits_RV, rows)) == [3, 5, 0]


def test_log_probabilities_under_a_grammar_are_those_of_the_raw_logits() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    (found,) = sample(logits_RV, [masked([1], params={"logprobs": 2})])
    assert isinstance(found, Sampled)
    assert found.logprobs is not None
    assert (found.token_id, found.logprobs.rank, found.logprobs.top_ids) == (1, 5, (5, 4))
    assert found.logprobs.logprob == pytest.approx(float(torch.log_softmax(logits_RV.double(), 1)[0, 1]), abs=1e-6)


def test_a_grammar_that_leaves_the_end_alone_wins_over_min_tokens() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    early = {"num_generated": 1, "params": {"min_tokens": 3}}
    assert sampled(logits_RV, [masked([2, 5], **early)]) == [2]
    assert sampled(logits_RV, [masked([5], **early)]) == [5]
    banned = {"num_generated": 1, "params": {"min_tokens": 3, "allowed_token_ids": [1, 5]}}
    assert sampled(logits_RV, [masked([2, 5], **banned)]) == [5]


def test_a_grammar_and_other_masks_that_leave_nothing_fail_their_row() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 2)
    first, second = sample(logits_RV, [masked([2], params={"allowed_token_ids": [1]}), masked([2])])
    assert isinstance(first, SampleError)
    assert first.code == "no_token_left"
    assert second == Sampled(2)
