# SPDX-License-Identifier: MIT OR Apache-2.0
"""Grammars through the head's process: over real sockets, with workers, beside requests without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.grammar.texts import Part, grammar_text, of_choice, of_json, of_regex
from metrale_ray.protocol.front import FrontClient
from metrale_ray.sampling.token_params import TokenParams
from tests.fixtures.succ import write_succ
from tests.fixtures.tokenizer import write_tokenizer
from tests.test_head import GREEDY, LONG, TIMEOUT_S, Process, end_of, running, tokens_of, until

END = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_succ(tmp_path_factory.mktemp("succ"), eos_token_id=END))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[Process, FrontClient]]:
    with running(model, max_batch_size=8) as both:
        yield both


def asking(part: Part | str, **params: Any) -> TokenParams:
    text = part if isinstance(part, str) else grammar_text(part)
    return TokenParams(**{"temperature": 0, "max_tokens": 40, "grammar": text, **params})


def refusal_of(handle: Any) -> tuple[str, str]:
    output = handle.get(TIMEOUT_S)
    assert output.finish_reason == "error"
    assert output.is_refusal
    assert output.error is not None
    return output.error  # type: ignore[no-any-return]


def test_an_answer_has_its_shape_beside_one_without(served: tuple[Process, FrontClient], model: Path) -> None:
    _, client = served
    plain = client.submit([1], LONG)
    handles = [client.submit([5], asking(of_choice(["yes", "no"]), n=2)), client.submit([5], asking(of_regex("z{6}")))]
    first: dict[int, list[int]] = {0: [], 1: []}
    ended = 0
    while ended < 2:
        output = handles[0].get(TIMEOUT_S)
        first[output.index] += output.token_ids
        ended += output.finish_reason == "stop"
    assert first[0] == first[1]
    assert first[0][-1] == END
    assert len(set(tokens_of(handles[1]))) == 2  # z, and the end
    plain.abort()
    assert end_of(plain) == "abort"


def test_what_cannot_be_compiled_is_refused_and_the_next_request_is_served(
    served: tuple[Process, FrontClient],
) -> None:
    process, client = served
    bad = ["start: (", '{"grammars":[{"json_schema":{"properties":{"foo":"bar"}}}]}', of_json('{"type":"what"}')]
    for text in bad:
        code, message = refusal_of(client.submit([1], asking(text)))
        assert (code, message.partition(":")[0]) == ("invalid_grammar", "the grammar is refused")
        assert tokens_of(client.submit([1], GREEDY)) == list(range(2, 10))
    until(lambda: process.call(process.head.stats())["running"] == 0)


def test_a_front_that_goes_while_its_grammar_is_compiled_leaves_nothing(served: tuple[Process, FrontClient]) -> None:
    process, client = served
    with process.front() as leaving:
        leaving.wait_opened(TIMEOUT_S)
        for number in range(4):
            leaving.submit([number], asking(of_regex(f"x{{{number + 90}}}"), max_tokens=3000))
        aborted = client.submit([9], asking(of_regex("y{95}")))
        aborted.abort()
        assert end_of(aborted) == "abort"

    def is_idle() -> bool:
        stats = process.call(process.head.stats())
        is_empty = len(process.head._inbox) == 0 and len(process.head._compiling) == 0
        return is_empty and stats["running"] == 0 and stats["free_blocks"] == stats["total_blocks"]

    until(is_idle)
    assert tokens_of(client.submit([1], GREEDY)) == list(range(2, 10))


class Panic(BaseException):
    """What a panic in Rust is in Python: no Exception."""


def test_an_engine_whose_tokenizer_for_grammars_fails_serves_all_that_need_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Panic("it panicked")

    monkeypatch.setattr("metrale_ray.grammar.grammars.new_vocabulary", fail)
    with running(model, 1) as (process, client):
        for _ in range(2):
            code, message = refusal_of(client.submit([1], asking(of_choice(["a"]))))
            assert (code, message.endswith("Panic: it panicked")) == ("invalid_grammar", True)
        assert tokens_of(client.submit([1], GREEDY)) == list(range(2, 10))
        assert process.head.state.phase == "ready"


def test_a_checkpoint_that_cannot_be_constrained_says_why(tmp_path: Path) -> None:
    bare = write_succ(tmp_path / "bare", eos_token_id=None)
    with running(bare, 1) as (_, client):
        code, message = refusal_of(client.submit([1], asking(of_choice(["a"]))))
        assert (code, "tokenizer.json" in message) == ("invalid_grammar", True)
        assert tokens_of(client.submit([1], GREEDY)) == list(range(2, 10))
    write_tokenizer(bare)
    with running(bare, 1) as (_, client):
        code, message = refusal_of(client.submit([1], asking(of_choice(["a"]))))
        assert (code, "eos_token_id" in message) == ("invalid_grammar", True)
        ends = asking(of_choice(["a"]), end_token_ids=[END])  # the front's tokenizer knows one
        assert tokens_of(client.submit([1], ends))[-1] == END
