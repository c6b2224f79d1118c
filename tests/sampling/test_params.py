# SPDX-License-Identifier: MIT OR Apache-2.0
"""SamplingParams: the texts that stay in the front are checked like everything else, and what is sent has none."""

from __future__ import annotations

import dataclasses
import pickle
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.token_params import TokenParams

LEGAL: list[tuple[str, Any, Any]] = [
    ("stop", None, ()),
    ("stop", [], ()),
    ("stop", "x", ("x",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", "x" * 256, ("x" * 256,)),
    ("stop", ["😀"] * 16, ("😀",) * 16),
    ("include_stop_str_in_output", True, True),
    ("skip_special_tokens", False, False),
    ("bad_words", None, ()),
    ("bad_words", "x", ("x",)),
    ("bad_words", ["x" * 256] * 1000, ("x" * 256,) * 1000),
]

# The field, what it is given, and what the message says is allowed.
REFUSED: list[tuple[str, Any, str]] = [
    *[(name, v, "1 to 256 characters") for name in ("stop", "bad_words") for v in ("", ["a", ""], "x" * 257)],
    *[(name, "x" * 10**6, "1 to 256 characters") for name in ("stop", "bad_words")],
    *[(name, v, "strings") for name in ("stop", "bad_words") for v in ([1], ["a", None], [["a"]], [b"a"])],
    *[
        (name, v, "a string, or a list of")
        for name in ("stop", "bad_words")
        for v in (b"x", {"a"}, 5, True, {"a": 1}, iter("ab"))
    ],
    *[(name, "\ud800", "valid Unicode") for name in ("stop", "bad_words")],
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", ["x"] * 500_000, "at most 16"),
    ("bad_words", ["a"] * 1001, "at most 1000"),
    ("bad_words", ["x"] * 50_000, "at most 1000"),
    *[
        (name, v, "true or false")
        for name in ("include_stop_str_in_output", "skip_special_tokens")
        for v in (0, 1, "true", None)
    ],
    ("temperature", -1, "a number from 0 to 100"),
    ("n", 10**6, "an integer from 1 to 64"),
]


def named(case: tuple[Any, ...]) -> str:
    value = case[1]
    return f"{case[0]}={value:g}" if isinstance(value, float) else f"{case[0]}-{type(value).__name__}"


def test_the_defaults_are_those_of_vllm() -> None:
    own: dict[str, Any] = {
        "stop": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "bad_words": (),
    }
    own["structured_outputs"] = None
    assert dataclasses.asdict(SamplingParams()) == dataclasses.asdict(TokenParams()) | own


@pytest.mark.parametrize(("name", "value", "kept"), LEGAL, ids=[named(case) for case in LEGAL])
def test_a_legal_value_is_kept_in_one_form(name: str, value: Any, kept: Any) -> None:
    stored = getattr(SamplingParams(**{name: value}), name)
    assert stored == kept
    assert type(stored) is type(kept)


@pytest.mark.parametrize(("name", "value", "allowed"), REFUSED, ids=[named(case) for case in REFUSED])
def test_an_illegal_value_is_refused_by_name_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert time.process_time() - started < 0.1  # microseconds, in truth
    message = caught.value.message
    assert caught.value.param == name
    assert message.startswith((f"{name} is ", f"{name} has "))
    assert allowed in message.partition("; allowed ")[2]
    assert "; give " in message
    assert len(message) < 300


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_params_are_frozen_and_survive_replace_and_pickle() -> None:
    params = SamplingParams(temperature=0.5, stop="x", seed=3, logit_bias={"7": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert dataclasses.replace(params, top_k=-1) == params
    assert dataclasses.replace(params, top_k=2).stop == ("x",)
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(temperature=0.5, stop=["x"], seed=3, logit_bias={7: 1.0}))


def test_what_is_sent_has_every_token_field_and_no_text() -> None:
    values: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 5,
        "max_tokens": 30,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": (4,),
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": ((1, 2.0),),
        "allowed_token_ids": (1, 2, 3),
        "bad_token_ids": ((1, 2),),
        "end_token_ids": (9,),
        "logprobs": 2,
        "prompt_logprobs": 1,
        "grammar": "start: 'a'",
    }
    params = SamplingParams(**values, stop="x", bad_words=["y"])
    assert set(values) == {field.name for field in dataclasses.fields(TokenParams)}
    sent = params.for_tokens(bad_token_ids=[(7,), [8, 9]], end_token_ids=[2, 3])
    assert type(sent) is TokenParams
    assert sent == TokenParams(**values | {"bad_token_ids": ((1, 2), (7,), (8, 9)), "end_token_ids": (9, 2, 3)})
    assert params.for_tokens() == TokenParams(**values)


def test_too_many_sequences_from_bad_words_are_refused_when_they_are_added() -> None:
    with pytest.raises(RequestError, match="bad_token_ids has 2001 entries"):
        SamplingParams(bad_words="x").for_tokens(bad_token_ids=[[1]] * 2001)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.one_of(st.integers(), st.text())),
)


@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), ANYTHING))
def test_any_value_is_either_taken_or_refused_as_a_request_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        assert error.param in {*values, "min_tokens"}  # noqa: PT017  both outcomes are legal; a small max_tokens clashes
    else:
        assert SamplingParams(**dataclasses.asdict(params)) == params
        assert params.for_tokens() == TokenParams(
            **{field.name: getattr(params, field.name) for field in dataclasses.fields(TokenParams)}
        )
