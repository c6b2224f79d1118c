# SPDX-License-Identifier: MIT OR Apache-2.0
"""Grammars over a real tokenizer: which tokens may come, where a text may end, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.grammar import constraint as constraints
from metrale_ray.grammar.check import MAX_PARTS, check_text
from metrale_ray.grammar.constraint import Constraint, masks
from metrale_ray.grammar.grammars import MAX_KEPT, Grammars
from metrale_ray.grammar.texts import Mark, Part, grammar_text, of_choice, of_grammar, of_json, of_regex
from tests.fixtures.tokenizer import write_tokenizer

END, OTHER_END, VOCAB_SIZE = 0, 319, 320
NUM_ENTRIES = 298


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, VOCAB_SIZE, [END])


def _mask(constraint: Constraint) -> np.ndarray[Any, np.dtype[np.bool_]]:
    (mask,) = masks([constraint])
    assert not isinstance(mask, str), mask
    return mask


def _takes(grammars: Grammars, text: str, output: str) -> tuple[int, bool]:
    """How many bytes of `output` the grammar takes, and whether the text may end there."""
    constraint = grammars.compile(text).copy([END])
    num_bytes = 0
    for token_id in grammars.load().tokenizer.tokenize_bytes(output.encode()):
        if not _mask(constraint)[token_id]:
            break
        constraint.advance(token_id)
        num_bytes += len(grammars.load().tokenizer.decode_bytes([token_id]))
    return num_bytes, bool(_mask(constraint)[END])


def _is_whole(
    grammars: Grammars, part: Part, output: str, after: str | None = None, opening: str | None = None
) -> bool:
    marks = [None if text is None else Mark(text) for text in (after, opening)]
    return _takes(grammars, grammar_text(part, *marks), output) == (len(output.encode()), True)


SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        (of_choice(["a", "ab"]), ["a", "ab"], ["", "b", "abb"]),
        (of_json(SCHEMA), ['{"a":1}', '{\n    "a": -12\n}'], ['{"a":"1"}', '{"b":1}', '{"a":1', "{ " + " " * 64]),
        (of_json("true"), ["[1, {}]", '"a   b"', "null"], ["nope", ""]),
        (of_regex("a/b\\/c\n\\d?"), ["a/b/c\n", "a/b/c\n1"], ["a/b/c", "a/b/c\n12"]),
        (of_regex("^(|.*)$"), ["", "anything"], ["a\n"]),
        (of_grammar('root ::= "a" b | \nb ::= [0-9/\\]^-]{1,2}'), ["", "a/", "a]^"], ["a", "aa", "a123"]),
        (of_grammar('start: "a"* "b"'), ["b", "aab"], ["a", "ba"]),
    ],
)
def test_what_has_the_shape_may_come_and_end_and_nothing_else(
    grammars: Grammars, part: Part, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not _is_whole(grammars, part, text)] == []
    assert [text for text in bad if _is_whole(grammars, part, text)] == []


@given(choice=st.text(min_size=1, max_size=20).filter(lambda text: max(text) < "\ud800" or min(text) > "\udfff"))
def test_every_choice_can_be_written_whatever_is_in_it(grammars: Grammars, choice: str) -> None:
    part = of_choice(["other", choice])
    assert _is_whole(grammars, part, choice)
    assert json.loads(grammar_text(part))["grammars"][0] == part


def test_a_shape_begins_behind_the_first_occurrence_of_a_text(grammars: Grammars) -> None:
    part = of_choice(["yes", "no"])
    for thoughts in ("", "no, </thin or </think", "\n\né "):
        assert _is_whole(grammars, part, f"{thoughts}</think>yes", "</think>")
        assert _is_whole(grammars, part, f"{thoughts}</think>\n\nyes", "</think>")
    assert not _is_whole(grammars, part, "no", "</think>")
    assert not _is_whole(grammars, part, "a</think>b</think>yes", "</think>")
    text = grammar_text(part, Mark("<|end|>", END))
    assert _takes(grammars, text, "no yes") == (6, False)  # END is not allowed as an end, but as that token


REGEX = of_regex("[a-z<> ]+")


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        (of_choice(["yes", "no"]), ["yes"], ["maybe", "", " yes"]),
        (of_json(SCHEMA), ['{"a":1}'], ['{"a":""}', "Hi", '\n{"a":1}']),
        (REGEX, ["a b", "<thin", "a<think>"], ["A", ""]),
    ],
)
def test_an_output_may_begin_with_what_a_mark_opens_or_with_its_shape(
    grammars: Grammars, part: Part, good: list[str], bad: list[str]
) -> None:
    marks = ("</think>", "<think>")
    assert [text for text in good if not _is_whole(grammars, part, text, *marks)] == []
    assert [text for text in bad if _is_whole(grammars, part, text, *marks)] == []
    for thoughts in ("<think></think>", "<think>\nhm, </thin or <think> \n</think>\n\n"):
        assert [text for text in good if not _is_whole(grammars, part, thoughts + text, *marks)] == []
        behind = [text for text in bad if text[:1] not in (" ", "\n")]
        assert [text for text in behind if _is_whole(grammars, part, thoughts + text, *marks)] == []
        assert not _is_whole(grammars, part, thoughts + "\n" * 40 + good[0], *marks)
    assert not _is_whole(grammars, part, f"<think>{good[0]}", *marks)  # not even where the shape allows the mark


def test_end_ids_are_allowed_exactly_where_the_text_may_end(grammars: Grammars) -> None:
    constraint = grammars.compile(grammar_text(of_regex("ab?"))).copy([END, OTHER_END])
    letters = [grammars.load().tokenizer.tokenize_str(letter)[0] for letter in "ab"]
    assert np.flatnonzero(_mask(constraint)).tolist() == [letters[0]]
    assert not constraint.may_end
    constraint.advance(letters[0])
    assert np.flatnonzero(_mask(constraint)).tolist() == [END, letters[1], OTHER_END]
    assert np.flatnonzero(_mask(constraint)).tolist() == [END, letters[1], OTHER_END]  # asking changes nothing
    unending = constraint.copy([END], goes_on=True)
    assert np.flatnonzero(_mask(unending)).tolist() == [letters[1]]
    unending.advance(letters[1])
    assert np.flatnonzero(_mask(unending)).tolist() == [END]
    assert np.flatnonzero(_mask(constraint)).tolist() == [END, letters[1], OTHER_END]  # a copy goes its own way


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed(grammars: Grammars, folder: Path) -> None:
    text = grammar_text(of_regex("(?s:.*)"))
    mask = _mask(grammars.compile(text).copy([END]))
    assert mask.shape == (VOCAB_SIZE,)
    assert not mask[NUM_ENTRIES:].any()
    smaller = _mask(Grammars(folder, 250, [END]).compile(text).copy([END]))
    assert np.array_equal(smaller, mask[:250])


def test_masks_of_a_batch_are_those_of_each_alone(grammars: Grammars) -> None:
    several = [grammars.compile(grammar_text(of_regex(regex))).copy([END]) for regex in ("a*", "[b-d]", "(?s:.*)", "")]
    together = masks(several)
    for one, mask in zip(several, together, strict=True):
        assert np.array_equal(mask, _mask(one))
    assert masks([]) == []


def test_one_that_cannot_go_on_says_why_and_the_others_go_on(grammars: Grammars) -> None:
    good, bad = (grammars.compile(grammar_text(of_regex("ab"))).copy([END]) for _ in range(2))
    bad.advance(END)
    first, second = masks([good, bad])
    assert not isinstance(first, str)
    assert isinstance(second, str)
    assert second
    assert bad.error == second


def test_one_that_is_slow_again_and_again_is_found_in_its_batch(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = (grammars.compile(grammar_text(of_regex("a*"))).copy([END]) for _ in range(2))
    monkeypatch.setattr(constraints, "SLOW_MASK_S", -1.0)  # every one is slow
    masks([quick, slow])
    assert quick.is_suspect
    assert slow.is_suspect
    monkeypatch.undo()
    masks([quick])
    assert not quick.is_suspect  # one slow batch is nothing
    monkeypatch.setattr(constraints, "SLOW_MASK_S", -1.0)
    found = [masks([slow])[0] for _ in range(6)]
    assert [isinstance(each, str) for each in found] == [False] * 4 + [True] * 2
    assert "make it simpler" in str(found[-1])


def test_what_was_compiled_lately_is_kept_and_copied(folder: Path) -> None:
    grammars = Grammars(folder, VOCAB_SIZE, [END])
    texts = [grammar_text(of_choice([f"choice {number}"])) for number in range(MAX_KEPT + 1)]
    assert grammars.kept(texts[0]) is None
    first = grammars.compile(texts[0])
    first.advance(END)  # ruined
    kept = grammars.kept(texts[0])
    assert kept is not None
    assert kept.error is None
    for text in texts[1:]:
        grammars.compile(text)
    assert grammars.kept(texts[0]) is None
    assert grammars.kept(texts[1]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "start: (",
        "start: nope",
        "{",
        '{"grammars":[]}',
        '{"grammars":5}',
        '{"a":' * 100_000,
        json.dumps({"grammars": [{"name": f"g{n}", "lark_grammar": 'start: "a"'} for n in range(MAX_PARTS + 1)]}),
        json.dumps({"grammars": [{"json_schema": {"properties": {"foo": "bar"}}}]}),
        json.dumps({"grammars": [{"lark_grammar": "start: " + " | ".join(f'"{n}" start' for n in range(12_000))}]}),
    ],
)
def test_a_text_that_makes_no_sense_is_refused_by_check_and_compiler(grammars: Grammars, text: str) -> None:
    for refuse in (check_text, grammars.compile):
        with pytest.raises(RequestError, match="the grammar is refused: ") as caught:
            refuse(text)
        assert caught.value.code == "invalid_grammar"
        assert len(caught.value.message) < 600


def test_one_that_allows_no_text_is_refused_in_these_words(grammars: Grammars) -> None:
    for part in (of_json('{"$ref":"#"}'), of_grammar("start: start")):
        with pytest.raises(RequestError, match=r"the grammar is refused: it allows no text$"):
            grammars.compile(grammar_text(part))


def test_rules_that_follow_rules_for_thousands_of_levels_do_not_end_the_process(grammars: Grammars) -> None:
    rules = [f"r{number}: r{number + 1}" for number in range(6000)]
    chain = "\n".join(["start: r0", *rules, 'r6000: "e"'])
    check_text(chain)
    assert _takes(grammars, chain, "e") == (1, True)


def test_a_grammar_whose_tokens_each_take_too_long_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metrale_ray.grammar.grammars.SLOW_MASK_S", -1.0)
    with pytest.raises(RequestError, match="each token takes"):
        grammars.compile(grammar_text(of_regex("slow?")))


class Panic(BaseException):
    """What a panic in Rust is in Python: no Exception."""


@pytest.mark.parametrize("failure", [MemoryError("none left"), OSError(5, "a broken disk"), Panic("it panicked")])
@pytest.mark.parametrize("place", ["llguidance", "new_vocabulary"])
def test_whatever_fails_in_reading_the_tokenizer_is_logged_once_and_refused_with_the_reason(
    folder: Path,
    place: str,
    failure: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise failure

    grammars = Grammars(folder, VOCAB_SIZE, [END])
    with monkeypatch.context() as patch:
        patch.setattr(f"metrale_ray.grammar.grammars.{place}", fail)
        grammars.prepare()
    for _ in range(2):
        with pytest.raises(RequestError, match="structured outputs are not possible here") as caught:
            grammars.compile("start: 'a'")
        assert caught.value.code == "invalid_grammar"
        assert caught.value.message.endswith(f"{type(failure).__name__}: {failure}")
    assert len(caplog.records) == 1


def test_a_tokenizer_that_the_library_cannot_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    grammars = Grammars(tmp_path, VOCAB_SIZE, [END])
    grammars.prepare()  # not its time to complain
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError, match="llguidance cannot use its tokenizer") as caught:
            grammars.compile("start: 'a'")
        assert caught.value.code == "invalid_grammar"
