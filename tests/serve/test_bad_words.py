# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which sequences of tokens a bad word becomes, in tokenizers that write spaces in different ways."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import MAX_BAD_WORDS, SamplingParams
from metrale_ray.serve.bad_words import bad_word_ids
from metrale_ray.serve.text import Tokenizer

SPACE = "Ġ"  # how a byte-level tokenizer writes it


def byte_level(*merges: tuple[str, str]) -> Tokenizer:
    """A byte-level tokenizer of all bytes and these merges, which puts a special token before every text."""
    vocabulary = {piece: index for index, piece in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    rust = RustTokenizer(models.BPE(vocabulary, list(merges)))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust), [])


PLAIN = byte_level()
MERGED = byte_level(("n", "o"), (SPACE, "no"))


def texts(sequences: tuple[tuple[int, ...], ...], tokenizer: Tokenizer) -> list[list[str]]:
    return [[tokenizer.token_text(token_id) for token_id in ids] for ids in sequences]


def test_a_word_is_banned_at_the_start_and_behind_a_space() -> None:
    assert texts(bad_word_ids(["no"], MERGED, 400), MERGED) == [["no"], [" no"]]


def test_a_word_whose_leading_space_is_a_token_of_its_own_is_banned_once() -> None:
    assert texts(bad_word_ids(["no", " no", "no"], PLAIN, 400), PLAIN) == [["n", "o"]]


def test_spaces_alone_are_banned_as_they_are() -> None:
    assert texts(bad_word_ids(["\n", "  "], PLAIN, 400), PLAIN) == [["\n"], [" ", " "]]


def test_special_tokens_that_the_tokenizer_adds_are_no_part_of_a_word() -> None:
    assert MERGED.encode("no")[0] == 0
    assert all(0 not in ids for ids in bad_word_ids(["no", "\n"], MERGED, 400))


def test_a_sequence_that_the_model_cannot_write_is_left_out() -> None:
    last = MERGED.encode(" no")[-1]
    assert texts(bad_word_ids(["no"], MERGED, last), MERGED) == [["no"]]
    assert bad_word_ids(["no"], MERGED, 1) == ()


def test_a_word_of_too_many_tokens_is_refused_with_their_number() -> None:
    with pytest.raises(RequestError, match=r"bad_words holds 'x+\.\.\.', which is 65 tokens .* words of 1 to 64") as e:
        bad_word_ids(["ok", "x" * 65], PLAIN, 400)
    assert e.value.param == "bad_words"


@settings(deadline=None)
@given(words=st.lists(st.text("no é\n", min_size=1, max_size=6), max_size=4))
def test_every_spelling_by_the_tokenizer_ends_with_a_banned_sequence(words: list[str]) -> None:
    for tokenizer in (PLAIN, MERGED):
        banned = bad_word_ids(words, tokenizer, 400)
        assert len(set(banned)) == len(banned)
        for word in words:
            for text in (word, word.lstrip(), " " + word.lstrip()) if word.strip() else (word,):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                assert any(ids[-len(sequence) :] == sequence for sequence in banned), text


def test_as_many_words_as_are_allowed_become_a_legal_request_soon() -> None:
    params = SamplingParams(bad_words=[f"word {number}" for number in range(MAX_BAD_WORDS)])
    started = time.perf_counter()
    sent = params.for_tokens(bad_word_ids(params.bad_words, MERGED, 400))
    assert len(sent.bad_token_ids) >= MAX_BAD_WORDS
    assert time.perf_counter() - started < 5
