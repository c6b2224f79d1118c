# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front over real sockets, with a real engine of two ranks behind it: what was asked for is what comes back."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.cli_answers import json_line
from metrale_ray.errors import RequestError
from metrale_ray.protocol.front import FrontClient
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from metrale_ray.serve.outputs import CompletionOutput, RequestOutput
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE
from tests.serve.pieces import piece_tokenizer
from tests.test_head import Process, running

# The model's greedy output counts up from the prompt's last token, so behind token 0 comes this text.
CHAIN = ["al", "pha ", "be", "ta ga", "mma de", "lta", "</s>"]
TEXT = "alpha beta gamma delta"
END = len(CHAIN)
# The model has 320 tokens; the tokenizer knows 300 of them.
PIECES = ["<s>", *CHAIN, *(f"<{number}>" for number in range(len(CHAIN) + 1, 300))]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}


def tokenizer_of_chain() -> Any:
    return piece_tokenizer(PIECES, special=[END])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, FrontClient]]:
    # A head scale of 0.2 leaves each token some chance.
    model: Path = write_succ(tmp_path_factory.mktemp("succ"), head_scale=0.2)
    with running(model, max_num_batched_tokens=16) as (process, client):
        yield process, client


class Asked:
    """A front, and what comes back of one call."""

    def __init__(self, process: Process, client: FrontClient) -> None:
        self._process = process
        self.front = Front(client, tokenizer_of_chain(), max_waiting=100)

    def items(self, prompt: Sequence[int], more: dict[str, Any] | None = None, **params: Any) -> list[RequestOutput]:
        (request,) = self.front.prepare.requests(prompt, SamplingParams(**{**GREEDY, **params}), **(more or {}))
        return asyncio.run(_collect(self.front.stream(request)))

    def whole(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[RequestOutput]:
        requests = self.front.prepare.requests(prompts, SamplingParams(**{**GREEDY, **params}))
        return asyncio.run(_collect(self.front.all(requests)))

    def check_live(self) -> None:
        """The engine serves as before, and nothing of an earlier request is left in it."""
        assert self.whole([[0]])[0].outputs[0].text == TEXT
        for _ in range(1000):
            stats = self._process.call(self._process.head.stats())
            if stats["running"] == stats["waiting"] == 0 and stats["free_blocks"] == stats["total_blocks"]:
                return
        raise AssertionError(f"something is left: {stats}")


async def _collect(items: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [item async for item in items]


@pytest.fixture
def asked(served: tuple[Process, FrontClient]) -> Iterator[Asked]:
    asked = Asked(*served)
    yield asked
    asked.check_live()


def check_stream(items: list[RequestOutput], index: int = 0) -> CompletionOutput:
    """The parts of a stream joined are the text, which only grows; the last item alone is finished."""
    last = items[-1].outputs[index]
    assert "".join(item.outputs[index].delta for item in items) == last.text
    assert all(last.text.startswith(item.outputs[index].text) for item in items)
    assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]
    return last


@pytest.mark.parametrize(
    ("stop", "found"),
    [
        (["beta gamma"], "beta gamma"),
        (["a b", "ha"], "ha"),
        (["a b"], "a b"),
        (["delta"], "delta"),
        ([TEXT], TEXT),
        (["delta!", "alphabet"], None),
        (["gamma delta", "mma", "ta g"], "ta g"),
        ([], None),
    ],
)
@pytest.mark.parametrize("included", [False, True])
def test_stop_strings_over_several_tokens_end_the_text_in_all_ways_alike(
    asked: Asked, stop: list[str], found: str | None, included: bool
) -> None:
    params = {"stop": stop, "include_stop_str_in_output": included}
    items = asked.items([0], **params)
    last = check_stream(items)
    end = len(TEXT) if found is None else TEXT.index(found) + (len(found) if included else 0)
    assert (last.text, last.finish_reason, last.stop_reason) == (TEXT[:end], "stop", found)
    (whole,) = asked.whole([[0]], **params)
    assert whole.outputs[0].text == last.text
    assert whole.outputs[0].token_ids == last.token_ids


def test_a_stop_string_within_the_first_tokens_does_not_end_the_text(asked: Asked) -> None:
    assert [asked.items([0], stop="a", min_tokens=n)[-1].outputs[0].text for n in (0, 1, 2, 3, 4)] == [
        "",
        "alph",
        "alpha bet",
        "alpha bet",
        "alpha beta gamm",
    ]


def test_special_tokens_are_shown_where_they_are_wanted(asked: Asked) -> None:
    shown = asked.items([0], skip_special_tokens=False, include_stop_str_in_output=True)[-1].outputs[0]
    assert (shown.text, shown.finish_reason, shown.stop_reason) == (TEXT + "</s>", "stop", None)
    ignored = asked.items([0], ignore_eos=True, max_tokens=8)[-1].outputs[0]
    assert (ignored.text, ignored.finish_reason) == (TEXT + "<8>", "length")


def test_the_tokenizers_own_end_leaves_room_for_as_many_stop_tokens_as_are_allowed(asked: Asked) -> None:
    stops = list(range(100, 228))
    last = asked.items([0], stop_token_ids=stops)[-1].outputs[0]
    assert (last.text, last.finish_reason) == (TEXT, "stop")
    last = asked.items([97], stop_token_ids=stops)[-1].outputs[0]
    assert (last.text, last.stop_reason) == ("<98><99>", 100)


def test_tokens_that_the_tokenizer_does_not_know_have_no_text(asked: Asked) -> None:
    last = asked.items([297], max_tokens=4, logprobs=1)[-1].outputs[0]
    assert (last.text, last.token_ids) == ("<298><299>", [298, 299, 300, 301])
    assert [entry[token].decoded_token for entry, token in zip(last.logprobs or [], last.token_ids, strict=True)] == [
        "<298>",
        "<299>",
        "",
        "",
    ]


def test_several_answers_are_those_of_one_seed_each_by_itself(asked: Asked) -> None:
    params = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    items = asked.items([9], **params)
    streamed = [check_stream(items, index) for index in range(4)]
    assert [answer.index for answer in streamed] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in streamed}) == 4
    (again,) = asked.whole([[9]], **params)
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in streamed]
    (fewer,) = asked.whole([[9]], **{**params, "n": 2})
    assert [answer.token_ids for answer in fewer.outputs] == [answer.token_ids for answer in streamed[:2]]


def test_of_several_answers_each_ends_by_itself(asked: Asked) -> None:
    (result,) = asked.whole([[250]], n=3, temperature=1.0, seed=1, max_tokens=40, ignore_eos=True, stop=["<2", "<1"])
    assert result.finished
    assert {answer.finish_reason for answer in result.outputs} <= {"stop", "length"}
    for answer in result.outputs:
        assert "<2" not in answer.text
        assert "<1" not in answer.text
        assert (answer.finish_reason == "stop") == (answer.stop_reason in ("<2", "<1"))


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1, "temperature": 1.0, "seed": 1},
        {"temperature": 1e-6},
        {"temperature": 2.0, "seed": 1, "top_p": 0.01},
        {"logit_bias": {"11": -100}},
        {"allowed_token_ids": [40, 41]},
    ],
)
def test_log_probabilities_are_finite_and_do_not_vary_with_the_parameters(asked: Asked, params: dict[str, Any]) -> None:
    given = {"max_tokens": 3, "logprobs": 5, "prompt_logprobs": 2, "ignore_eos": True}
    (result,) = asked.whole([[9, 10]], **given, **params)
    (answer,) = result.outputs
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 3
    for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True):
        assert next(iter(entry)) == token_id
        assert all(math.isfinite(scored.logprob) and scored.logprob <= 0 for scored in entry.values())
        assert sorted(scored.rank for scored in entry.values())[:5] == [1, 2, 3, 4, 5]
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    (plain,) = asked.whole([[9, 10]], **given)
    assert plain.outputs[0].logprobs is not None
    likeliest = {token_id: scored for token_id, scored in answer.logprobs[0].items() if scored.rank <= 5}
    assert likeliest == plain.outputs[0].logprobs[0]
    json.loads(json_line(0, result), parse_constant=lambda name: pytest.fail(name))


def test_the_prompts_log_probabilities_are_those_of_the_same_tokens_when_they_are_generated(asked: Asked) -> None:
    (generated,) = asked.whole([[9]], max_tokens=40, logprobs=3, ignore_eos=True)
    tokens, scored = generated.outputs[0].token_ids, generated.outputs[0].logprobs
    assert scored is not None
    for n in (1, 2):
        (result,) = asked.whole([[9, *tokens]], prompt_logprobs=3, max_tokens=1, n=n)
        found = result.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == len(result.prompt_token_ids) == 41
        for one, other in zip(found[1:], scored, strict=True):
            assert one is not None
            assert list(one) == list(other)
            assert all(math.isclose(one[i].logprob, other[i].logprob, abs_tol=1e-5) for i in one)
            assert [one[i].rank for i in one] == [other[i].rank for i in other]


def test_what_is_banned_or_allowed_does_not_or_alone_come(asked: Asked) -> None:
    banned = asked.items([20], bad_token_ids=[[21], [30, 31]], max_tokens=30, ignore_eos=True)[-1].outputs[0].token_ids
    assert 21 not in banned
    assert (30, 31) not in set(pairwise(banned))
    allowed = asked.items([20], allowed_token_ids=[50, 51], max_tokens=9, ignore_eos=True)[-1].outputs[0].token_ids
    assert set(allowed) == {50, 51}


def test_a_request_that_takes_too_long_keeps_what_it_has(asked: Asked) -> None:
    answer = asked.items([8], {"timeout_s": 0.2}, max_tokens=3900, ignore_eos=True)[-1].outputs[0]
    assert (answer.finish_reason, answer.error_code) == ("error", "deadline_exceeded")
    assert answer.text == "".join(PIECES[token] for token in answer.token_ids if token < 300 and token != END)


def test_the_same_refusals_whether_the_front_or_the_head_finds_them(
    asked: Asked, served: tuple[Process, FrontClient]
) -> None:
    """A front of another make may send what this one refuses."""
    _, client = served
    cases: list[tuple[Sequence[int], dict[str, Any]]] = [
        ([], {}),
        ([VOCAB_SIZE], {}),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}),
        ([1], {"logit_bias": {VOCAB_SIZE: 1}}),
        ([1], {"allowed_token_ids": [VOCAB_SIZE]}),
        ([1], {"bad_token_ids": [[1, VOCAB_SIZE]]}),
    ]
    for prompt, params in cases:
        given = SamplingParams(**params)
        refused = client.submit(prompt, given.for_tokens()).get(30)
        assert refused.is_refusal
        with pytest.raises(RequestError) as caught:
            asked.front.prepare.requests([prompt], given)
        assert refused.error is not None
        assert caught.value.code == refused.error[0]
    too_long = client.submit([1] * 4000, SamplingParams().for_tokens()).get(30)
    assert too_long.error is not None
    (ours,) = asked.items([1] * 4000)
    assert (ours.outputs[0].error_code, ours.outputs[0].error) == too_long.error
