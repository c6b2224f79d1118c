# SPDX-License-Identifier: MIT OR Apache-2.0
"""From the head's outputs to the text that a reader sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_ray.errors import SessionError
from metrale_ray.protocol.front import Output
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.completion import Completion
from metrale_ray.serve.outputs import CompletionOutput
from metrale_ray.serve.stop_strings import StopAutomaton
from metrale_ray.serve.text import Tokenizer, load_tokenizer
from tests.fixtures.tokenizer import write_tokenizer
from tests.serve.pieces import cut, feed, outputs_of, piece_tokenizer

TEXT = "one two, three; four"
CHAIN = "alpha beta gamma delta"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found = load_tokenizer(folder)
    assert found is not None
    return found


def completion_of(tokenizer: Tokenizer | None, params: SamplingParams) -> Completion:
    """An answer to an empty prompt."""
    return Completion(tokenizer, params, StopAutomaton(params.stop), [])


def read(completion: Completion, token_ids: Sequence[int], reason: str = "length") -> list[CompletionOutput]:
    """Push one token at a time, the last with `reason`, and give every answer seen."""
    stop = token_ids[-1] if reason == "stop" else None
    return feed(completion, outputs_of([[token_id] for token_id in token_ids], reason, stop))


def test_the_pieces_are_the_whole_text(tokenizer: Tokenizer) -> None:
    seen = read(completion_of(tokenizer, SamplingParams()), tokenizer.encode(TEXT))
    assert seen[-1].text == TEXT
    assert "".join(answer.delta for answer in seen) == TEXT
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("length", None)
    assert [answer.finish_reason for answer in seen[:-1]] == [None] * (len(seen) - 1)


def test_a_stop_string_ends_the_text_before_it_and_is_named(tokenizer: Tokenizer) -> None:
    seen = read(completion_of(tokenizer, SamplingParams(stop=["three", "four"])), tokenizer.encode(TEXT))
    assert seen[-1].text == "one two, "
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("stop", "three")
    assert all("t" not in answer.text[5:] for answer in seen)  # no part of it was ever shown


def test_a_stop_string_that_is_wanted_ends_the_text_too(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["three", "four"], include_stop_str_in_output=True)
    seen = read(completion_of(tokenizer, params), tokenizer.encode(TEXT))
    assert (seen[-1].text, seen[-1].finish_reason, seen[-1].stop_reason) == ("one two, three", "stop", "three")
    assert "".join(answer.delta for answer in seen) == "one two, three"


def test_the_head_is_to_be_told_of_a_stop_string_once_and_only_when_it_goes_on() -> None:
    params = SamplingParams(stop="b")
    completion = completion_of(piece_tokenizer(["a", "b"]), params)
    assert [completion.push(Output(0, 0, (token_id,))) for token_id in (0, 1, 0, 1)] == [False, True, False, False]
    assert completion.snapshot().token_ids == [0, 1]
    at_the_end = completion_of(piece_tokenizer(["a", "b"]), params)
    assert not at_the_end.push(Output(0, 0, (0, 1), "length"))
    assert (at_the_end.snapshot().finish_reason, at_the_end.snapshot().stop_reason) == ("stop", "b")


@st.composite
def spelled(draw: st.DrawFn) -> tuple[list[str], list[list[int]]]:
    """A text as tokens cut anywhere, empty ones too, and the outputs in which they come."""
    text = draw(st.one_of(st.just(CHAIN), st.text("ab ", min_size=1, max_size=14)))
    pieces = cut(text, draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    parts = cut(list(range(len(pieces))), draw(st.lists(st.integers(0, len(pieces)), max_size=len(pieces))))
    return pieces, [part for part in parts if part]


def first_end(pieces: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    """The plain rule: where in the text the first stop string ends that is not within the first tokens, and which."""
    text, early = "".join(pieces), len("".join(pieces[:min_tokens]))
    for end in range(early + 1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return end, max(here, key=len)
    return None


@settings(deadline=None)
@given(
    spelled=spelled(),
    stops=st.lists(
        st.sampled_from(["beta gamma", "a b", "ha", "delta", "delta!", "a", "b", "ab", "ba", "aab", " "]), max_size=4
    ),
    included=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_a_stop_string_ends_the_text_at_the_same_place_however_it_is_spelled_and_however_it_comes(
    spelled: tuple[list[str], list[list[int]]], stops: list[str], included: bool, min_tokens: int
) -> None:
    pieces, parts = spelled
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=included, min_tokens=min_tokens, max_tokens=99, logprobs=0
    )
    scored = [
        Output(0, 0, o.token_ids, o.finish_reason, logprobs=tuple(TokenLogprobs(i, -1.0, 2) for i in o.token_ids))
        for o in outputs_of(parts)
    ]
    seen = feed(completion_of(piece_tokenizer(pieces), params), scored)
    last = seen[-1]
    found = first_end(pieces, stops, min_tokens)
    text = "".join(pieces)
    if found is None:
        assert (last.text, last.finish_reason, last.stop_reason) == (text, "length", None)
        assert last.token_ids == list(range(len(pieces)))
    else:
        end, stop = found
        expected = text[:end] if included else text[: end - len(stop)]
        assert (last.text, last.finish_reason, last.stop_reason) == (expected, "stop", stop)
        used = next(count for count in range(len(pieces) + 1) if len("".join(pieces[:count])) >= end)
        assert last.token_ids == list(range(used))
    assert "".join(answer.delta for answer in seen) == last.text
    assert all(last.text.startswith(answer.text) for answer in seen)
    assert last.logprobs is not None
    assert len(last.logprobs) == len(last.token_ids)
    assert last.cumulative_logprob == -len(last.token_ids)


def test_what_may_become_a_stop_string_and_does_not_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    seen = read(completion_of(tokenizer, SamplingParams(stop="four!")), tokenizer.encode(TEXT))
    assert (seen[-1].text, seen[-1].finish_reason) == (TEXT, "length")


def test_a_stop_token_of_the_request_is_named_and_is_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT)
    params = SamplingParams(stop_token_ids=(token_ids[-1],))
    seen = read(completion_of(tokenizer, params), token_ids, "stop")
    assert seen[-1].text == tokenizer.decode(token_ids[:-1])
    assert (seen[-1].stop_reason, seen[-1].token_ids) == (token_ids[-1], token_ids)


def test_a_stop_token_that_is_wanted_is_part_of_the_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT)
    params = SamplingParams(stop_token_ids=(token_ids[-1],), include_stop_str_in_output=True)
    seen = read(completion_of(tokenizer, params), token_ids, "stop")
    assert (seen[-1].text, seen[-1].stop_reason) == (TEXT, token_ids[-1])


@pytest.mark.parametrize(("skips", "text"), [(True, "ab"), (False, "a<s>b</s>")])
def test_special_tokens_are_shown_only_where_they_are_not_skipped(skips: bool, text: str) -> None:
    tokenizer = piece_tokenizer(["a", "b", "<s>", "</s>"], special=[2, 3])
    params = SamplingParams(skip_special_tokens=skips, include_stop_str_in_output=True)
    assert read(completion_of(tokenizer, params), [0, 2, 1, 3], "stop")[-1].text == text


def test_the_token_that_ends_a_text_is_not_shown_with_the_special_ones() -> None:
    tokenizer = piece_tokenizer(["a", "</s>"], special=[1])
    params = SamplingParams(skip_special_tokens=False)
    assert read(completion_of(tokenizer, params), [0, 1], "stop")[-1].text == "a"


def test_a_stop_string_that_ends_in_the_last_of_the_first_tokens_is_passed_over_in_their_held_back_text_too() -> None:
    # A character that is not whole is held back until the end, which comes with the stop token.
    tokenizer = piece_tokenizer(["a", "\ufffd", "c"])
    params = SamplingParams(stop="\ufffd", min_tokens=2, stop_token_ids=[2])
    last = read(completion_of(tokenizer, params), [0, 1, 2], "stop")[-1]
    assert (last.text, last.stop_reason) == ("a\ufffd", 2)


def test_the_models_own_end_is_no_reason_to_name(tokenizer: Tokenizer) -> None:
    seen = read(completion_of(tokenizer, SamplingParams()), tokenizer.encode(TEXT), "stop")
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("stop", None)


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    seen = read(completion_of(None, SamplingParams()), [5, 6, 7])
    assert (seen[-1].text, seen[-1].token_ids) == ("", [5, 6, 7])


def test_ids_that_the_tokenizer_does_not_know_have_no_text(tokenizer: Tokenizer) -> None:
    token_ids = [token_id for known in tokenizer.encode(TEXT) for token_id in (known, 319, 2**31)]
    last = read(completion_of(tokenizer, SamplingParams()), token_ids)[-1]
    assert (last.text, last.token_ids) == (TEXT, token_ids)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_was_cut_short_keeps_its_text_and_its_own_reason(tokenizer: Tokenizer, reason: str) -> None:
    completion = completion_of(piece_tokenizer(["a", "\ufffd"]), SamplingParams(stop=["\ufffd", "b"]))
    completion.push(Output(0, 0, (0, 1)))
    error = ("deadline_exceeded", "it took too long") if reason == "error" else None
    assert not completion.push(Output(0, 0, (), reason, None, error))  # type: ignore[arg-type]
    answer = completion.snapshot()
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a\ufffd", reason, None)
    assert (answer.error_code, answer.error) == (error or (None, None))


def test_a_failure_keeps_what_came_before_it_and_its_reason(tokenizer: Tokenizer) -> None:
    completion = completion_of(tokenizer, SamplingParams())
    token_ids = tokenizer.encode(TEXT)
    completion.push(Output(0, 0, tuple(token_ids)))
    completion.push(Output(0, 0, (), "error", None, ("command_failed", "an expert broke")))
    answer = completion.snapshot()
    assert (answer.text, answer.finish_reason) == (TEXT, "error")
    assert (answer.error_code, answer.error) == ("command_failed", "an expert broke")


def test_logprobs_have_the_token_first_and_the_likeliest_by_rank(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("on")[:2]
    completion = completion_of(tokenizer, SamplingParams(logprobs=2))
    scored = (
        TokenLogprobs(one, -2.5, 7, (two, 319), (-0.5, -1.0)),
        TokenLogprobs(two, -0.25, 1, (two, one), (-0.25, -2.0)),
    )
    completion.push(Output(0, 0, (one, two), logprobs=scored))
    answer = completion.snapshot()
    assert answer.logprobs is not None
    told = [[(i, p.logprob, p.rank, p.decoded_token) for i, p in entry.items()] for entry in answer.logprobs]
    texts = [tokenizer.decode([one]), tokenizer.decode([two])]
    assert told == [
        [(one, -2.5, 7, texts[0]), (two, -0.5, 1, texts[1]), (319, -1.0, 2, "")],
        [(two, -0.25, 1, texts[1]), (one, -2.0, 2, texts[0])],
    ]
    assert math.isclose(answer.cumulative_logprob or 0, -2.75)


def test_without_logprobs_there_are_none_and_without_a_tokenizer_they_have_no_texts() -> None:
    plain = read(completion_of(None, SamplingParams()), [5])[-1]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    completion = completion_of(None, SamplingParams(logprobs=0))
    completion.push(Output(0, 0, (5,), logprobs=(TokenLogprobs(5, -1.0, 3),)))
    assert [entry[5].decoded_token for entry in completion.snapshot().logprobs or []] == [None]


def test_tokens_without_the_logprobs_that_were_asked_for_break_the_session() -> None:
    completion = completion_of(None, SamplingParams(logprobs=0))
    with pytest.raises(SessionError, match="0 logprobs came with 2 tokens"):
        completion.push(Output(0, 0, (1, 2)))


def test_a_snapshot_does_not_change_with_later_tokens_and_its_delta_is_new_since_the_last(tokenizer: Tokenizer) -> None:
    seen = read(completion_of(tokenizer, SamplingParams()), tokenizer.encode(TEXT))
    assert [len(answer.token_ids) for answer in seen] == list(range(1, len(seen) + 1))
    completion = completion_of(piece_tokenizer("abc"), SamplingParams())
    for token_id in (0, 1):
        completion.push(Output(0, 0, (token_id,)))
    assert [completion.snapshot().delta, completion.snapshot().delta] == ["ab", ""]


@settings(deadline=None)
@given(spelled=spelled(), stops=st.lists(st.sampled_from(["beta gamma", "ha", "ab", "b"]), max_size=2))
def test_deltas_joined_are_the_snapshot_with_a_text_and_a_place_for_each_token(
    spelled: tuple[list[str], list[list[int]]], stops: list[str]
) -> None:
    pieces, parts = spelled
    params = SamplingParams(stop=stops, max_tokens=99, logprobs=0)
    scored = [
        Output(0, 0, o.token_ids, o.finish_reason, logprobs=tuple(TokenLogprobs(i, -1.0, 2) for i in o.token_ids))
        for o in outputs_of(parts)
    ]
    last = feed(completion_of(piece_tokenizer(pieces), params), scored)[-1]
    completion = completion_of(piece_tokenizer(pieces), params)
    deltas = []
    for output in scored:
        completion.push(output)
        assert completion.has_news or completion.has_ended
        deltas.append(completion.delta())
        assert not completion.has_news
    assert "".join(delta.text for delta in deltas) == last.text
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert token_ids == last.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs] == last.logprobs
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert offsets == [len("".join(pieces[:token_id])) for token_id in token_ids]
    (end,) = [delta for delta in deltas if delta.finish_reason is not None]
    assert (end.finish_reason, end.stop_reason) == (last.finish_reason, last.stop_reason)
    assert all(len(delta.texts) == len(delta.token_ids) for delta in deltas if delta is not end)
