# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is taken, what is refused, and what is sent: before anything goes to the head."""

from __future__ import annotations

import time
from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.protocol.front import Opened
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.serve.prompts import CHARACTERS_PER_TOKEN, Preparation, listed_prompts
from metrale_ray.serve.text import Tokenizer
from metrale_ray.vocabulary import check_vocabulary
from tests.serve.pieces import Pieces

VOCAB_SIZE = 320
MAX_MODEL_LEN = 100
OPENED = Opened(MAX_MODEL_LEN, VOCAB_SIZE, 1)
SOON_S = 10.0  # ten times what a busy machine takes


class Letters(Pieces):
    """A token for each letter, and three that end a text, of which the model knows two."""

    def __init__(self) -> None:
        super().__init__([chr(32 + index) for index in range(95)])

    def encode(self, text: str, **more: Any) -> list[int]:
        return [ord(letter) - 32 for letter in text]


TEXT = Preparation(Tokenizer(Letters(), [90, 5, VOCAB_SIZE]), OPENED)
BARE = Preparation(None, OPENED)


def test_text_becomes_ids_and_ids_stay() -> None:
    found = TEXT.requests(["ab", [7, 8]])
    assert [(one.text, one.token_ids, one.refusal) for one in found] == [("ab", (65, 66), None), (None, (7, 8), None)]
    assert [one.token_ids for one in TEXT.requests([7, 8])] == [(7, 8)]
    assert TEXT.requests([]) == []


def test_the_tokenizers_own_ends_and_the_bad_words_are_sent_as_tokens() -> None:
    params = SamplingParams(
        temperature=0, stop="x", bad_words=["no"], skip_special_tokens=False, stop_token_ids=range(128)
    )
    (one,) = TEXT.requests("a", params)
    bad = (tuple(Letters().encode("no")),)
    assert one.params is params
    assert one.sent.params == TokenParams(
        temperature=0, bad_token_ids=bad, end_token_ids=(5, 90), stop_token_ids=range(128)
    )
    assert type(one.sent.params) is TokenParams


def test_one_for_all_or_one_for_each() -> None:
    greedy, other = SamplingParams(temperature=0), SamplingParams(n=2)
    found = BARE.requests([[1], [2]], [greedy, other], priority=[3, -4], timeout_s=[None, 1])
    assert [(one.params, one.priority, one.timeout_s) for one in found] == [(greedy, 3, None), (other, -4, 1.0)]
    found = BARE.requests([[1], [2]], greedy, priority=2**31 - 1, timeout_s=0.5)
    assert [(one.params, one.priority, one.timeout_s) for one in found] == [(greedy, 2**31 - 1, 0.5)] * 2
    assert found[0].sent is found[1].sent


@pytest.mark.parametrize("prompts", [None, 5, 3.5, True, b"a", {"prompt": "a"}, {1, 2}, [1, "a"], [1, True], [1, 2.0]])
def test_what_is_no_prompt_is_refused_with_what_is(prompts: Any) -> None:
    with pytest.raises(RequestError, match="give a text, a list of token ids, or a list of these") as caught:
        BARE.requests(prompts)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3.5, r"prompt 1 is 3\.5, which is no prompt"),
        ([1, "a"], r"prompt 1 is \[1, 'a'\], which is no prompt"),
        ([[1]], r"prompt 1 is \[\[1\]\], which is no prompt"),
        ([True], r"prompt 1 is \[True\], which is no prompt"),
        ([], "prompt 1: the prompt has 0 tokens; it must have at least 1"),
        ("text", "prompt 1: this checkpoint has no tokenizer files: give token ids instead of text"),
    ],
)
def test_one_bad_prompt_refuses_the_whole_call_with_its_index(bad: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        BARE.requests([[1], bad, [2]])
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("bad", "shown"),
    [([-1], "-1"), ([5, 320, 4], "320"), ([2**32], "4294967296"), ([-(10**400)], "an integer of 1329 bits")],
)
def test_a_prompt_with_an_id_that_the_model_has_not_is_refused_as_the_head_would(bad: list[int], shown: str) -> None:
    with pytest.raises(RequestError) as caught:
        BARE.requests([[1], bad, [2]])
    with pytest.raises(RequestError) as of_the_head:
        check_vocabulary(bad, TokenParams(), VOCAB_SIZE)
    assert f"prompt_token_ids holds {shown}; token ids of this model are 0 to 319" in caught.value.message
    assert caught.value.message == f"prompt 1: {of_the_head.value.message}"
    assert caught.value.param == of_the_head.value.param == "prompt_token_ids"


def test_the_last_token_of_the_vocabulary_is_taken() -> None:
    params = SamplingParams(stop_token_ids=[319], logit_bias={319: 1}, allowed_token_ids=[319], bad_token_ids=[[319]])
    assert BARE.requests([319], params)[0].token_ids == (319,)


def test_empty_texts_have_a_code_of_their_own() -> None:
    with pytest.raises(RequestError, match="the prompt has 0 tokens") as caught:
        TEXT.requests("")
    assert caught.value.code == "empty_prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [3, 320]),
        ("logit_bias", {320: 1.0}),
        ("allowed_token_ids", [0, 320]),
        ("bad_token_ids", [[0], [1, 320]]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_with_field_value_and_range(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=f"^{name} holds 320; token ids of this model are 0 to 319") as caught:
        BARE.requests([[1], [2]], params)
    assert caught.value.param == name
    with pytest.raises(RequestError, match=f"prompt 1: {name} holds 320"):
        BARE.requests([[1], [2]], [SamplingParams(), params])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"priority": 2**31}, "priority is 2147483648; allowed is an integer from -2147483648 to 2147483647"),
        ({"priority": -(2**31) - 1}, "priority is -2147483649"),
        ({"priority": 1.0}, "priority is 1.0"),
        ({"priority": True}, "priority is True"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": [1, 2]}, "priority has 2 entries for 1 prompts; give one for all, or one for each"),
        ({"timeout_s": 0}, "timeout_s is 0; allowed is a number above 0"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
        ({"timeout_s": 10**400}, "timeout_s is an integer of"),
        ({"timeout_s": "5"}, "timeout_s is '5'"),
        ({"timeout_s": [1.0, 2.0]}, "timeout_s has 2 entries for 1 prompts"),
        ({"params": {"n": 2}}, "sampling_params is of type dict; allowed is SamplingParams"),
        ({"params": TokenParams()}, "sampling_params is of type TokenParams; allowed is SamplingParams"),
        ({"params": [SamplingParams()] * 2}, "sampling_params has 2 entries for 1 prompts"),
        ({"params": []}, "sampling_params has 0 entries for 1 prompts"),
        ({"params": SamplingParams(stop="x")}, "stop needs a tokenizer, and this checkpoint has none; use stop_tok"),
        ({"params": SamplingParams(bad_words=["x"])}, "bad_words needs a tokenizer, .* use bad_token_ids"),
    ],
)
def test_what_else_is_wrong_is_refused_with_its_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        BARE.requests([1], **more)
    assert caught.value.param == message.split()[0]


@pytest.mark.parametrize(("length", "is_refused"), [(98, False), (99, False), (100, True), (10**6, True)])
def test_a_prompt_that_is_too_long_is_not_sent_and_leaves_the_others_alone(length: int, is_refused: bool) -> None:
    for prepared, prompt in ((BARE, [1] * length), (TEXT, "a" * length)):
        long, other = prepared.requests([prompt, [2]])
        assert other.refusal is None
        if not is_refused:
            assert long.refusal is None
            continue
        assert long.refusal is not None
        code, message = long.refusal
        assert code == "context_length_exceeded"
        unit = "tokens" if long.token_ids else "characters"
        assert message.startswith(f"the prompt has {length} {unit}; at most 99 ")
        assert "are allowed, as max_model_len is 100 and counts the answer too" in message


def test_a_text_that_is_far_too_long_is_not_even_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Letters, "encode", lambda self, text, **more: calls.append(text))
    length = MAX_MODEL_LEN * CHARACTERS_PER_TOKEN + 1
    (one,) = TEXT.requests("a" * length)
    assert (one.token_ids, calls) == ((), [])
    assert one.refusal is not None
    assert f"the prompt has {length} characters" in one.refusal[1]


def test_large_input_is_refused_soon() -> None:
    million = list(range(10**6))
    started = time.perf_counter()
    for prompts in ([*million, "a"], [[1], [*million, None]], [*([[1]] * 10**5), 5], {"a": million}, 10**5000):
        with pytest.raises(RequestError) as caught:
            listed_prompts(prompts)  # type: ignore[arg-type]
        assert len(caught.value.message) < 500
    assert BARE.requests(million)[0].refusal is not None
    assert time.perf_counter() - started < SOON_S


def test_parameters_that_many_prompts_share_are_turned_into_tokens_once() -> None:
    found = BARE.requests([[1, 2]] * 10_000, SamplingParams(allowed_token_ids=range(VOCAB_SIZE)))
    assert len({id(one.sent) for one in found}) == 1
