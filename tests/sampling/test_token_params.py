# SPDX-License-Identifier: MIT OR Apache-2.0
"""TokenParams: legal values are kept in one form, everything else is refused by name, at once."""

from __future__ import annotations

import dataclasses
import math
import pickle
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.sampling.token_params import TokenParams

NAN, INF = math.nan, math.inf

LEGAL: list[tuple[str, Any, Any]] = [
    ("n", 1, 1),
    ("n", 64, 64),
    ("temperature", 0, 0.0),
    ("temperature", -0.0, 0.0),
    ("temperature", 100, 100.0),
    ("temperature", 1e-320, 1e-320),
    ("top_k", 0, 0),
    ("top_k", -1, 0),
    ("top_k", 2**31, 2**31),
    ("top_k", 2**32 - 1, 2**32 - 1),
    ("top_p", 1, 1.0),
    ("top_p", 1e-300, 1e-300),
    ("min_p", 0, 0.0),
    ("min_p", -0.0, 0.0),
    ("min_p", 1, 1.0),
    ("seed", None, None),
    ("seed", 0, 0),
    ("seed", 2**63, 2**63),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("max_tokens", None, None),
    ("max_tokens", 1, 1),
    ("max_tokens", 2**32 - 1, 2**32 - 1),
    ("min_tokens", 0, 0),
    ("min_tokens", 16, 16),
    ("ignore_eos", True, True),
    ("stop_token_ids", None, ()),
    ("stop_token_ids", [0, 2**32 - 1], (0, 2**32 - 1)),
    ("stop_token_ids", range(128), tuple(range(128))),
    ("repetition_penalty", 1, 1.0),
    ("repetition_penalty", 5e-324, 5e-324),
    ("repetition_penalty", 100, 100.0),
    ("presence_penalty", -2, -2.0),
    ("presence_penalty", 2, 2.0),
    ("presence_penalty", -0.0, 0.0),
    ("frequency_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("logit_bias", None, ()),
    ("logit_bias", {}, ()),
    ("logit_bias", {7: 1, 3: -100}, ((3, -100.0), (7, 1.0))),
    ("logit_bias", {"319": 100, "0": 0}, ((0, 0.0), (319, 100.0))),
    ("logit_bias", [(5, 1.5)], ((5, 1.5),)),
    ("logit_bias", dict.fromkeys(range(1024), 1), tuple((token_id, 1.0) for token_id in range(1024))),
    ("allowed_token_ids", None, None),
    ("allowed_token_ids", [2**32 - 1, 0], (2**32 - 1, 0)),
    ("allowed_token_ids", range(2**17), tuple(range(2**17))),
    ("bad_token_ids", None, ()),
    ("bad_token_ids", [[1, 2], (3,)], ((1, 2), (3,))),
    ("bad_token_ids", [[0] * 64] * 2000, ((0,) * 64,) * 2000),
    ("end_token_ids", None, ()),
    ("end_token_ids", [2], (2,)),
    ("end_token_ids", range(64), tuple(range(64))),
    ("logprobs", None, None),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("prompt_logprobs", None, None),
    ("prompt_logprobs", 0, 0),
    ("prompt_logprobs", 20, 20),
]

NO_ID = [-1, 2**32, 2**63, 1.0, 1.5, True, "5", None]
NO_PENALTY = [-2.000001, 2.1, 1e308, 10**400, NAN, INF, -INF, "1", True, None]
FAR_TOO_LONG = range(10**6)

# The field, what it is given, and what the message says is allowed. First for numbers, then for lists.
REFUSED: list[tuple[str, Any, str]] = [
    *[("n", v, "an integer from 1 to 64") for v in (0, -1, 65, 10**6, 1.0, True, "1", None, NAN)],
    *[
        ("temperature", v, "a number from 0 to 100")
        for v in (NAN, INF, -INF, -1, -1e-9, 100.01, 10**400, "0.7", True, None, [1])
    ],
    *[("top_k", v, "an integer from 0 to 2**32 - 1") for v in (-2, 2**32, 1.0, True, "1", None)],
    *[
        ("top_p", v, "a number above 0 and at most 1")
        for v in (0, 0.0, -0.0, -0.5, 1.0000001, NAN, INF, "1", False, None)
    ],
    *[("min_p", v, "a number from 0 to 1") for v in (-0.1, 1.0000001, 2, NAN, INF, -INF, "0", False, None)],
    *[("seed", v, "an integer from 0 to 2**64 - 1") for v in (-1, 2**64, 10**20, "7", 1.5, True, NAN)],
    *[("max_tokens", v, "an integer from 1 to 2**32 - 1") for v in (0, -1, 2**32, 1e9, True, "5")],
    *[("min_tokens", v, "an integer from 0 to 2**32 - 1") for v in (-1, 2**32, 1.0, False, "5", None)],
    *[("min_tokens", v, "an integer from 0 to max_tokens, which is 16") for v in (17, 10**9)],
    *[("ignore_eos", v, "true or false") for v in (1, 0, "true", None)],
    *[
        ("repetition_penalty", v, "a number above 0 and at most 100")
        for v in (0, -0.0, -1, 100.1, 1e308, 10**400, NAN, INF, "1", True, None)
    ],
    *[(f"{kind}_penalty", v, "a number from -2 to 2") for kind in ("presence", "frequency") for v in NO_PENALTY],
    *[
        (name, v, "an integer from 0 to 20")
        for name in ("logprobs", "prompt_logprobs")
        for v in (-1, 21, 10**6, 5.0, True, "5")
    ],
    *[
        (name, [1, v], "an integer from 0 to 2**32 - 1")
        for name in ("stop_token_ids", "allowed_token_ids", "end_token_ids")
        for v in NO_ID
    ],
    *[("bad_token_ids", [[1], [2, v]], "an integer from 0 to 2**32 - 1") for v in NO_ID],
    *[
        (name, v, "a list of at most")
        for name in ("stop_token_ids", "allowed_token_ids", "end_token_ids")
        for v in ("12", b"12", 7, {1}, {1: 2}, iter([1]), math.pi)
    ],
    ("stop_token_ids", range(129), "at most 128"),
    ("stop_token_ids", FAR_TOO_LONG, "at most 128"),
    ("end_token_ids", range(65), "at most 64"),
    ("end_token_ids", FAR_TOO_LONG, "at most 64"),
    ("allowed_token_ids", [], "a list of 1 or more"),
    ("allowed_token_ids", range(2**17 + 1), "at most 131072"),
    ("allowed_token_ids", FAR_TOO_LONG, "at most 131072"),
    *[("bad_token_ids", v, "token id lists") for v in ("12", 7, [7], ["12"], [None, 7], {1}, [{1}])],
    *[("bad_token_ids", v, "each of 1 to 64") for v in ([[]], [None], [[1], []])],
    ("bad_token_ids", [[1]] * 2001, "at most 2000"),
    ("bad_token_ids", FAR_TOO_LONG, "at most 2000"),
    ("bad_token_ids", [range(65)], "at most 64"),
    ("bad_token_ids", [FAR_TOO_LONG], "at most 64"),
    *[
        ("logit_bias", {key: 1.0}, "an integer from 0 to 2**32 - 1")
        for key in (-1, 2**32, 2**63, 1.5, True, None, "abc", "", "-1", "05", "+5", " 5", "5_0", "٥", "4294967296")
    ],
    *[
        ("logit_bias", {5: bias}, "a number from -100 to 100")
        for bias in (1e9, -100.5, 10**400, NAN, INF, "1", True, None)
    ],
    *[("logit_bias", v, "a mapping from token ids") for v in ("abc", 5, {1}, 1.0)],
    *[("logit_bias", v, "pairs of a token id and a bias") for v in ([5], [(5,)], [(1, 2, 3)], ["ab"])],
    ("logit_bias", {5: 1, "5": 2}, "each token id once"),
    ("logit_bias", [(5, 1), (5, 1)], "each token id once"),
    ("logit_bias", dict.fromkeys(range(1025), 1), "at most 1024"),
    ("logit_bias", dict.fromkeys(range(10**5), 1), "at most 1024"),
    ("logit_bias", [None] * 10**6, "at most 1024"),
]


def named(case: tuple[Any, ...]) -> str:
    value = case[1]
    return f"{case[0]}={value:g}" if isinstance(value, float) else f"{case[0]}-{type(value).__name__}"


def test_the_defaults_are_those_of_vllm_and_change_nothing() -> None:
    assert dataclasses.asdict(TokenParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": (),
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "allowed_token_ids": None,
        "bad_token_ids": (),
        "end_token_ids": (),
        "logprobs": None,
        "prompt_logprobs": None,
        "grammar": None,
    }
    assert not TokenParams().needs_history


@pytest.mark.parametrize(("name", "value", "kept"), LEGAL, ids=[named(case) for case in LEGAL])
def test_a_legal_value_is_kept_in_one_form(name: str, value: Any, kept: Any) -> None:
    stored = getattr(TokenParams(**{name: value}), name)
    assert stored == kept
    assert type(stored) is type(kept)
    assert not (isinstance(stored, float) and math.copysign(1.0, stored) < 0 and stored == 0)


@pytest.mark.parametrize(("name", "value", "allowed"), REFUSED, ids=[named(case) for case in REFUSED])
def test_an_illegal_value_is_refused_by_name_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        TokenParams(**{name: value})
    message = caught.value.message
    assert caught.value.param == name
    assert message.startswith((f"{name} is ", f"{name} has "))
    assert allowed in message.partition("; allowed ")[2]
    assert "; give " in message
    assert len(message) < 300


def test_a_number_that_is_given_is_shown() -> None:
    for name, value in (("top_p", 1.5), ("seed", 2**64), ("stop_token_ids", [-7]), ("logit_bias", {"abc": 1})):
        with pytest.raises(RequestError) as caught:
            TokenParams(**{name: value})  # type: ignore[arg-type]
        shown = {"stop_token_ids": "is -7", "logit_bias": "has the token id 'abc'"}.get(name, f"is {value}")
        assert caught.value.message.startswith(f"{name} {shown}; ")


HUGE: list[tuple[str, Any]] = [
    *[(name, [0] * 10**6) for name in ("stop_token_ids", "allowed_token_ids", "bad_token_ids", "end_token_ids")],
    ("logit_bias", [(0, 0)] * 10**6),
    ("logit_bias", dict.fromkeys(range(10**5), 0)),
    ("bad_token_ids", [[0] * 10**6]),
    *[(name, 10**5000) for name in ("n", "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "logprobs")],
    ("stop_token_ids", "5" * 10**6),
    ("seed", "5" * 10**6),
]


@pytest.mark.parametrize(("name", "value"), HUGE, ids=[named(case) for case in HUGE])
def test_a_huge_value_is_refused_in_no_time(name: str, value: Any) -> None:
    times = []
    for _ in range(5):
        started = time.process_time()
        with pytest.raises(RequestError, match=name):
            TokenParams(**{name: value})
        times.append(time.process_time() - started)
    assert min(times) < 0.002


def test_the_largest_legal_lists_are_taken_in_milliseconds() -> None:
    started = time.process_time()
    TokenParams(
        stop_token_ids=list(range(128)),
        allowed_token_ids=list(range(2**17)),
        bad_token_ids=[[0] * 64] * 2000,
        logit_bias={str(token_id): 1 for token_id in range(1024)},
    )
    assert time.process_time() - started < 0.5  # some 20 ms


def test_min_tokens_is_bounded_by_max_tokens_alone() -> None:
    assert TokenParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert TokenParams(min_tokens=10**9, max_tokens=None).min_tokens == 10**9
    with pytest.raises(RequestError, match="max_tokens, which is 5"):
        TokenParams(min_tokens=6, max_tokens=5)


def test_history_is_needed_for_penalties_and_bad_sequences_only() -> None:
    needs: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"bad_token_ids": [[1, 2]]},
    ]
    assert all(TokenParams(**values).needs_history for values in needs)
    assert [TokenParams(**values).has_penalties for values in needs] == [True, True, True, False]
    assert not TokenParams(logit_bias={1: 1}, allowed_token_ids=[1], logprobs=3, min_p=0.1, min_tokens=2).needs_history


def test_params_are_frozen_equal_by_value_and_survive_replace_and_pickle() -> None:
    params = TokenParams(temperature=0.5, logit_bias={3: 1}, bad_token_ids=[[1, 2]], allowed_token_ids=[3, 4], seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert dataclasses.replace(params, top_k=-1) == params
    assert dataclasses.replace(params, top_k=2).logit_bias == ((3, 1.0),)
    assert dataclasses.replace(params, top_k=2) != params
    assert hash(dataclasses.replace(params)) == hash(params)
    assert pickle.loads(pickle.dumps(params)) == params


def test_only_temperature_zero_is_greedy() -> None:
    assert TokenParams(temperature=0).is_greedy
    assert not TokenParams(temperature=1e-9).is_greedy


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())
ANYTHING = st.one_of(
    PLAIN,
    st.lists(st.one_of(PLAIN, st.lists(PLAIN, max_size=3)), max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text()), PLAIN, max_size=3),
)


@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(TokenParams)]), ANYTHING))
def test_any_value_is_either_taken_or_refused_as_a_request_error(values: dict[str, Any]) -> None:
    try:
        params = TokenParams(**values)
    except RequestError as error:
        assert error.param in {*values, "min_tokens"}  # noqa: PT017  both outcomes are legal; a small max_tokens clashes
    else:
        assert 0 <= params.temperature <= 100
        assert 0 < params.top_p <= 1
        assert params.min_tokens <= (params.max_tokens or 2**32)
        assert TokenParams(**dataclasses.asdict(params)) == params
