# SPDX-License-Identifier: MIT OR Apache-2.0
"""SamplingParams: legal values are kept as given, everything else is refused by name."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import SamplingParams

LEGAL: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", -0.0, 0.0),
    ("temperature", 100, 100.0),
    ("temperature", 1e-320, 1e-320),
    ("top_k", 0, 0),
    ("top_k", -1, 0),
    ("top_k", 2**32 - 1, 2**32 - 1),
    ("top_p", 1, 1.0),
    ("top_p", 1e-300, 1e-300),
    ("seed", None, None),
    ("seed", 0, 0),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("max_tokens", None, None),
    ("max_tokens", 1, 1),
    ("ignore_eos", True, True),
    ("stop", None, ()),
    ("stop", "x", ("x",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", "x" * 256, ("x" * 256,)),
    ("stop", ["😀"] * 16, ("😀",) * 16),
    ("stop_token_ids", None, ()),
    ("stop_token_ids", [0, 2**32 - 1], (0, 2**32 - 1)),
    ("stop_token_ids", range(128), tuple(range(128))),
]

REFUSED: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (math.nan, math.inf, -math.inf, -1, -1e-9, 100.01, 10**400, "0.7", True, None, [1])],
    *[("top_k", v) for v in (-2, 2**32, 1.0, True, "1", None)],
    *[("top_p", v) for v in (0, 0.0, -0.5, 1.0000001, math.nan, math.inf, "1", False, None)],
    *[("seed", v) for v in (-1, 2**64, 10**20, "7", 1.5, True)],
    *[("max_tokens", v) for v in (0, -1, 2**32, 1e9, True, "5")],
    *[("ignore_eos", v) for v in (1, 0, "true", None)],
    *[("stop", v) for v in ("", ["a", ""], ["a"] * 17, "x" * 257, [1], b"x", {"a"}, 5, "\ud800", iter("ab"))],
    *[("stop_token_ids", v) for v in ([-1], [2**32], [1.0], [True], ["5"], range(129), "12", b"12", 7, {1})],
]


def test_the_defaults_are_those_of_vllm() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": None,
        "max_tokens": 16,
        "ignore_eos": False,
        "stop": (),
        "stop_token_ids": (),
    }


@pytest.mark.parametrize(("name", "value", "kept"), LEGAL)
def test_a_legal_value_is_kept_in_one_form(name: str, value: Any, kept: Any) -> None:
    stored = getattr(SamplingParams(**{name: value}), name)
    assert stored == kept
    assert type(stored) is type(kept)
    assert not (isinstance(stored, float) and math.copysign(1.0, stored) < 0)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_an_illegal_value_is_refused_with_the_fields_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert re.match(rf"{name} (is|has) .*; allowed (is|are) .*; give ", caught.value.message)


def test_a_refusal_is_short_however_large_the_value_is() -> None:
    for name, value in (("stop", ["x" * 1_000_000]), ("seed", 10**5000), ("temperature", 10**5000)):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        assert len(caught.value.message) < 300
    with pytest.raises(RequestError, match="500000 entries"):
        SamplingParams(stop=["x"] * 500_000)


def test_params_are_frozen_and_survive_replace_and_pickle() -> None:
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert dataclasses.replace(params, top_k=-1) == params
    assert dataclasses.replace(params, top_k=2).stop == ("x",)
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(temperature=0.5, stop=["x"], seed=3))


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


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
        assert error.param in values  # noqa: PT017  both outcomes are legal; this one must name a field that was given
    else:
        assert 0 <= params.temperature <= 100
        assert 0 < params.top_p <= 1
        assert SamplingParams(**dataclasses.asdict(params)) == params
