# SPDX-License-Identifier: MIT OR Apache-2.0
"""From the head's outputs to the text that a reader sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from metrale_ray.protocol.front import Output
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.completion import Completion
from metrale_ray.serve.outputs import CompletionOutput
from metrale_ray.serve.text import Tokenizer, load_tokenizer
from tests.fixtures.tokenizer import write_tokenizer

TEXT = "one two, three; four"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found = load_tokenizer(folder)
    assert found is not None
    return found


def read(completion: Completion, token_ids: Sequence[int], reason: str = "length") -> list[CompletionOutput]:
    """Push one token at a time, the last with `reason`, and give every answer seen."""
    seen = []
    for place, token_id in enumerate(token_ids):
        last = place == len(token_ids) - 1
        stop = token_id if last and reason == "stop" else None
        completion.push(Output(0, 0, (token_id,), reason if last else None, stop))  # type: ignore[arg-type]
        seen.append(completion.snapshot())
        if completion.stopped_by_string:
            break
    return seen


def test_the_pieces_are_the_whole_text(tokenizer: Tokenizer) -> None:
    seen = read(Completion(tokenizer, SamplingParams(), []), tokenizer.encode(TEXT))
    assert seen[-1].text == TEXT
    assert "".join(answer.delta for answer in seen) == TEXT
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("length", None)
    assert [answer.finish_reason for answer in seen[:-1]] == [None] * (len(seen) - 1)


def test_a_stop_string_ends_the_text_before_it_and_is_named(tokenizer: Tokenizer) -> None:
    seen = read(Completion(tokenizer, SamplingParams(stop=["three", "four"]), []), tokenizer.encode(TEXT))
    assert seen[-1].text == "one two, "
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("stop", "three")
    assert all("t" not in answer.text[5:] for answer in seen)  # no part of it was ever shown


def test_what_may_become_a_stop_string_and_does_not_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    seen = read(Completion(tokenizer, SamplingParams(stop="four!"), []), tokenizer.encode(TEXT))
    assert (seen[-1].text, seen[-1].finish_reason) == (TEXT, "length")


def test_a_stop_token_of_the_request_is_named_and_is_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT)
    params = SamplingParams(stop_token_ids=(token_ids[-1],))
    seen = read(Completion(tokenizer, params, []), token_ids, "stop")
    assert seen[-1].text == tokenizer.decode(token_ids[:-1])
    assert (seen[-1].stop_reason, seen[-1].token_ids) == (token_ids[-1], token_ids)


def test_the_models_own_end_is_no_reason_to_name(tokenizer: Tokenizer) -> None:
    seen = read(Completion(tokenizer, SamplingParams(), []), tokenizer.encode(TEXT), "stop")
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("stop", None)


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    seen = read(Completion(None, SamplingParams(), []), [5, 6, 7])
    assert (seen[-1].text, seen[-1].token_ids) == ("", [5, 6, 7])


def test_a_failure_keeps_what_came_before_it_and_its_reason(tokenizer: Tokenizer) -> None:
    completion = Completion(tokenizer, SamplingParams(), [])
    token_ids = tokenizer.encode(TEXT)
    completion.push(Output(0, 0, tuple(token_ids)))
    completion.push(Output(0, 0, (), "error", None, ("command_failed", "an expert broke")))
    answer = completion.snapshot()
    assert (answer.text, answer.finish_reason) == (TEXT, "error")
    assert (answer.error_code, answer.error) == ("command_failed", "an expert broke")


def test_a_snapshot_does_not_change_with_later_tokens(tokenizer: Tokenizer) -> None:
    seen = read(Completion(tokenizer, SamplingParams(), []), tokenizer.encode(TEXT))
    assert [len(answer.token_ids) for answer in seen] == list(range(1, len(seen) + 1))
