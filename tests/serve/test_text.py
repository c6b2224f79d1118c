# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tokenizers, incremental detokenization and stop strings, with small tokenizers made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from metrale_ray.errors import CheckpointError, RequestError
from metrale_ray.serve.text import IncrementalDetokenizer, Tokenizer, load_tokenizer

TEXTS = ["Hello world", "naïve café", "你好，世界", "a 👍🏽 b 👩‍👩‍👧‍👦!", "\n\n  x\t", "مرحبا", "a\ufffdb", "e\u0301"]
SPECIAL = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ '<|start|>' + m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant: ' }}{% endif %}"
)


def byte_level() -> RustTokenizer:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    rust.train_from_iterator(TEXTS * 3, trainer)
    rust.add_tokens(["<tool>"])
    return rust


def byte_fallback() -> RustTokenizer:
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Helowrdé你!", "▁w", "▁▁", "\ufffd"]
    rust = RustTokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.add_special_tokens(SPECIAL)
    return rust


def metaspace() -> RustTokenizer:
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", "▁a", "b", "▁▁c", "d▁", "你"])]
    rust = RustTokenizer(models.Unigram(pieces, unk_id=0))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens(SPECIAL)
    return rust


def word_piece() -> RustTokenizer:
    pieces = ["[UNK]", "a", "##b", "c", ".", "do", "##n", "'", "t"]
    rust = RustTokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    rust.add_special_tokens(SPECIAL)
    return rust


def word_ends() -> RustTokenizer:
    pieces = ["<unk>", "a", "b</w>", "c</w>", "你"]
    rust = RustTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    rust.decoder = decoders.BPEDecoder()
    rust.add_special_tokens(SPECIAL)
    return rust


def wrapped(rust: RustTokenizer) -> Tokenizer:
    inner = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>", chat_template=TEMPLATE)
    return Tokenizer(inner, [inner.eos_token_id])


TOKENIZERS = {make.__name__: wrapped(make()) for make in (byte_level, byte_fallback, metaspace, word_piece, word_ends)}


def pieces_of(whole: Any, cuts: Sequence[int]) -> list[Any]:
    edges = [0, *sorted(cuts), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    tokenizer = TOKENIZERS[name]
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    few = st.sampled_from(
        [*range(min(12, tokenizer.vocab_size)), *range(max(0, tokenizer.vocab_size - 8), tokenizer.vocab_size)]
    )
    words = st.sampled_from(TEXTS).map(tokenizer.encode)
    return st.lists(st.one_of(any_id.map(lambda i: [i]), few.map(lambda i: [i]), words), max_size=24).map(
        lambda lists: [i for ids in lists for i in ids]
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_the_pieces_joined_are_the_decode_of_all_ids_however_they_come(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(name))
    skip = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=12)) if data.draw(st.booleans()) else range(len(ids))
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    shown = "".join(detokenizer.push(piece) for piece in pieces_of(ids, list(cuts)))
    assert shown + detokenizer.flush() == tokenizer.decode(ids, skip)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_decode_is_the_librarys_own(name: str, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.vocab_size
    runs = [[(first + 7 * step) % (size + 3) for step in range(4)] for first in range(size + 3)]
    runs += [[], *(tokenizer.encode(text) for text in TEXTS)]
    for ids in runs:
        expected = tokenizer.inner.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(tuple(ids), skip) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_shown_with_its_last_byte_and_never_before(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    alphabet = {byte: tokenizer.inner.convert_tokens_to_ids(char) for byte, char in byte_characters().items()}
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = ""
    content = text.encode()
    for end, byte in enumerate(content, start=1):
        shown += detokenizer.push([alphabet[byte]])
        whole = content[:end].decode(errors="ignore")
        assert shown in (whole, whole.removesuffix("\ufffd"))
    assert shown + detokenizer.flush() == text


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte, by encoding each byte that is a character, and by elimination."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_an_emoji_split_over_tokens_comes_as_a_whole() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer.inner.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "👍".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", ""]
    assert detokenizer.push(tokenizer.inner.convert_tokens_to_ids(["!"])) == "👍!"


def test_a_run_of_byte_tokens_that_turns_out_wrong_was_not_shown_as_characters() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.inner.convert_tokens_to_ids(["<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "!"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) == "\ufffd" * 4 + "!" == tokenizer.decode(ids)


def test_an_unfinished_character_is_shown_as_such_at_the_end_only() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.inner.convert_tokens_to_ids([byte_characters()[byte] for byte in b"a\xf0\x9f"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_the_first_space_is_dropped_at_the_start_and_kept_behind_a_context() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    world = tokenizer.inner.convert_tokens_to_ids(["▁w", "o"])
    hello = tokenizer.encode("Hello")
    newline = tokenizer.inner.convert_tokens_to_ids(["<0x0A>"])
    assert IncrementalDetokenizer(tokenizer).push(world) == "wo"
    assert IncrementalDetokenizer(tokenizer, context=hello).push(world) == " wo"
    assert IncrementalDetokenizer(tokenizer, context=hello + newline).push(world) == " wo"
    behind_bytes = IncrementalDetokenizer(tokenizer, context=hello + newline)
    assert behind_bytes.push(newline + world) == "\n wo"


@pytest.mark.parametrize("context", ["Hello", "", "你"])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_behind_a_context_the_text_is_what_follows_it(name: str, context: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids, before = tokenizer.encode("Hello w"), tokenizer.encode(context)
    detokenizer = IncrementalDetokenizer(tokenizer, context=before)
    shown = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert tokenizer.decode(before) + shown == tokenizer.decode(before + ids)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("byte_level", byte_characters()[0xFF]),
        ("byte_level", byte_characters()[0xF0]),
        ("byte_level", "<|end|>"),
        ("byte_level", "e"),
        ("byte_level", None),
        ("byte_fallback", "<0xFF>"),
        ("byte_fallback", "<|end|>"),
        ("byte_fallback", "\ufffd"),
    ],
)
@pytest.mark.parametrize("skip", [True, False])
def test_the_work_grows_with_the_number_of_ids_however_strange_they_are(
    name: str, token: str | None, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = wrapped({"byte_level": byte_level, "byte_fallback": byte_fallback}[name]())
    token_id = tokenizer.vocab_size if token is None else tokenizer.inner.convert_tokens_to_ids(token)
    decode, decoded = tokenizer.decode, [0]

    def counting(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded[0] += len(ids)
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    ids = [token_id] * 1000
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    shown = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
    assert decoded[0] <= 40 * len(ids)
    assert shown == decode(ids, skip)


def save(folder: Path, make: Callable[[], RustTokenizer] = byte_level, **more: Any) -> Path:
    inner = PreTrainedTokenizerFast(tokenizer_object=make(), eos_token="<|end|>", **more)
    inner.save_pretrained(folder)
    return folder


def test_a_saved_tokenizer_is_loaded_and_gives_the_text_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path))
    assert tokenizer is not None
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(TOKENIZERS["byte_level"].inner)


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_damaged_tokenizer_is_refused_with_its_folder(tmp_path: Path) -> None:
    (save(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        load_tokenizer(tmp_path)


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = save(tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        assert load_tokenizer(folder) is not None
    except CheckpointError as error:
        assert "cannot be loaded" in str(error)  # noqa: PT017  # either answer is right, running the code is not
    assert not marker.exists()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {1}),
        ({"config.json": {"eos_token_id": 5}}, {1, 5}),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [6, 7]}}, {1, 6, 7}),
        ({"generation_config.json": {"eos_token_id": None}}, {1}),
        ({"generation_config.json": {}}, {1}),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {}}, {1, 5}),
    ],
)
def test_the_ids_that_end_a_text_are_those_of_the_tokenizer_and_of_the_configuration(
    tmp_path: Path, files: dict[str, Any], expected: set[int]
) -> None:
    save(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == expected


@pytest.mark.parametrize(
    "content", ["{", "[1]", "null", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}', '{"eos_token_id": -1}']
)
def test_a_broken_generation_config_is_refused(tmp_path: Path, content: str) -> None:
    (save(tmp_path) / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_tokenizer(tmp_path)


def test_a_conversation_is_encoded_up_to_where_the_answer_begins() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>user: Hello<|end|><|start|>assistant: "
    assert tokenizer.decode(ids) == "user: Helloassistant: "


@pytest.mark.parametrize(
    "messages", [[{"role": "robot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}]]
)
def test_messages_that_the_template_refuses_are_a_request_error(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="chat template refuses these messages") as caught:
        TOKENIZERS["byte_level"].chat(messages)
    assert caught.value.param == "messages"


def test_a_conversation_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path))
    assert tokenizer is not None
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="has no chat template") as caught:
        tokenizer.chat([{"role": "user", "content": "Hello"}])
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_that_stand_for_no_token_have_no_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    padded = [tokenizer.vocab_size, tokenizer.vocab_size + 7, 2**31, 2**32 - 1]
    assert [tokenizer.token_text(token_id) for token_id in padded] == [""] * 4
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("a c")
    shown = "".join(detokenizer.push([token_id]) for pair in zip(ids, padded, strict=False) for token_id in pair)
    assert shown + detokenizer.flush() == tokenizer.decode(ids[: len(padded)])


def test_the_text_of_a_special_token_by_itself_is_told() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end, hello = tokenizer.inner.convert_tokens_to_ids("<|end|>"), tokenizer.encode("H")[0]
    assert [tokenizer.token_text(token_id) for token_id in (end, hello)] == ["<|end|>", "H"]


def test_special_tokens_are_added_unless_they_are_not_wanted() -> None:
    rust = byte_level()
    rust.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    tokenizer = wrapped(rust)
    bare = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [0, *bare]


def test_a_text_that_is_no_unicode_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2; give valid Unicode"):
        TOKENIZERS["byte_level"].encode("ab\ud800")
