# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text to token ids, and token ids back to text as they come.

Rules. Text that was given out is never taken back: what an incremental detokenizer gives, joined, is the decode of
all its ids, and no character is split. It takes time in proportion to the number of ids, however strange they are.
Ids that stand for no token (a model's vocabulary may be padded) have no text. Code in a checkpoint's folder is never
run. transformers is imported when a tokenizer is loaded, not before.

Leaves out: the strings that end a text (`stop_strings`), reasoning and tool-call parsers, images.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metrale_ray.errors import CheckpointError, RequestError

# Any one of these holds a vocabulary.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# What a decoder shows in the place of bytes that are not, or not yet, a character.
REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so the last 4 tokens settle where a decoder stands; twice that to be clear of it.
MAX_UNSETTLED = 32
KEPT_UNSETTLED = 8


class Tokenizer:
    """A checkpoint's tokenizer. `inner` is one of transformers; `eos_token_ids` are all ids that end a text."""

    def __init__(self, inner: Any, eos_token_ids: Iterable[int]) -> None:
        self.inner = inner
        self.eos_token_ids = frozenset(eos_token_ids)
        self.byte_token_ids = _byte_token_ids(inner)
        # What has been looked up of tokens. Of ids that stand for no token nothing is kept: clients may send any.
        self._known_ids: set[int] = set()
        self._texts: dict[int, str] = {}
        # What others found out about a token, once for each: its bytes, and its name among log probabilities.
        self.known_bytes: dict[int, list[int]] = {}
        self.known_names: dict[int, str] = {}
        self._special_ids = _special_ids(inner)
        self._rust = _rust_of(inner)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's output head may have more rows."""
        return len(self.inner)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return bool(self.inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the special tokens that the tokenizer adds by default, or without them.

        Raises RequestError for a text that is no valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}; give valid Unicode", param="prompt"
            ) from error
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins.

        Raises RequestError when the checkpoint has no chat template, or when the template refuses the messages.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; send a prompt to completions instead of messages",
                code="no_chat_template",
                param="messages",
            )
        try:
            ids = self.inner.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return list(ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Spaces are kept as they are; ids that stand for no token have no text."""
        ids = list(token_ids)
        if self._rust is not None:  # once or twice for each token that is generated
            return str(self._rust.decode(ids, skip_special_tokens=skip_special_tokens))
        text = self.inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, of a special one too; "" for an id that stands for no token."""
        text = self._texts.get(token_id)
        if text is None:
            if self.is_silent(token_id, skip_special_tokens=False):
                return ""
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def special_id(self, text: str) -> int | None:
        """The special token whose text is `text`, or None."""
        found = (token_id for token_id in self._special_ids if self.token_text(token_id) == text)
        return next(found, None)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that has this text, or None for any other text."""
        return next((token_id for token_id in self._special_ids if self.token_text(token_id) == text), None)

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the id has no influence on a decode: it stands for no token, or for a special one that is skipped."""
        if skip_special_tokens and token_id in self._special_ids:
            return True
        if token_id in self._known_ids:
            return False
        if self.inner.convert_ids_to_tokens(token_id) is None:
            return True
        self._known_ids.add(token_id)
        return False


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of the checkpoint in the folder `path`, or None when it has none. Raises CheckpointError."""
    if not any((path / name).is_file() for name in VOCABULARY_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library, and the one in Rust below it, raise bare Exceptions
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    own = [] if inner.eos_token_id is None else [int(inner.eos_token_id)]
    return Tokenizer(inner, [*own, *_configured_eos_ids(path)])


def _configured_eos_ids(path: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, or of config.json where it names none: one id, several or none."""
    for file in (path / "generation_config.json", path / "config.json"):
        if not file.is_file():
            continue
        try:
            values = dict(json.loads(file.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
        if "eos_token_id" in values:
            return _checked_ids(file, values["eos_token_id"])
    return []


def _checked_ids(file: Path, value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"{file}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return ids


def _byte_token_ids(inner: Any) -> frozenset[int]:
    """The ids of the 256 byte tokens of a tokenizer with byte fallback; empty for any other."""
    vocabulary = inner.get_vocab()
    ids = [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]
    return frozenset() if None in ids else frozenset(ids)


def _rust_of(inner: Any) -> Any | None:
    """The tokenizer in Rust, where decoding with spaces as they are is nothing but a call of it; else None."""
    kind = type(inner)
    is_plain = (
        inner.is_fast
        and kind.decode.__module__ == "transformers.tokenization_utils_base"
        and kind._decode.__module__ == "transformers.tokenization_utils_tokenizers"
    )
    return inner.backend_tokenizer if is_plain else None


def _special_ids(inner: Any) -> frozenset[int]:
    if not inner.is_fast:
        return frozenset(inner.all_special_ids)
    return frozenset(token_id for token_id, token in inner.added_tokens_decoder.items() if token.special)


class IncrementalDetokenizer:
    """The text of one stream of ids, as far as later ids cannot change it.

    Held back: bytes that are not yet a character, and with byte fallback a whole run of byte tokens, as its decoder
    takes a run for characters or for errors as a whole. `context` are ids in front of the stream: a tokenizer that
    drops a text's first space then keeps that of the stream. The text of the context itself is not given out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # `_window` ends with the newest ids and starts where the text was whole; `_shown` of its text is given out.
        # Its first `_num_old` ids are there because a decoder may treat the first ones of a text in its own way.
        self._window = self._audible(context)
        self._num_old = len(self._window)
        self._shown = self._settled(self._decode())

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make final; may be empty."""
        new_ids = self._audible(token_ids)
        self._join(new_ids)
        if not new_ids or new_ids[-1] in self._tokenizer.byte_token_ids:
            return ""
        text = self._decode()
        settled = self._settled(text)
        if not settled.startswith(self._shown):
            return ""
        new_text = settled[len(self._shown) :]
        self._shown = settled
        if new_text and settled == text:
            self._forget_old()
        elif settled != text and len(self._window) > MAX_UNSETTLED:
            self._keep_last(KEPT_UNSETTLED)
        return new_text

    def flush(self) -> str:
        """The rest of the text at the end of the stream, with replacement characters for what never became whole."""
        text = self._decode()
        rest = text[_common_length(text, self._shown) :]
        self._shown = text
        return rest

    def _join(self, new_ids: list[int]) -> None:
        """Put the new ids behind the window. A run of byte tokens that goes on from the context starts anew."""
        byte_ids = self._tokenizer.byte_token_ids
        only_context = len(self._window) == self._num_old
        if only_context and new_ids and self._window and {self._window[-1], new_ids[0]} <= byte_ids:
            self._window, self._num_old, self._shown = [], 0, ""
        self._window += new_ids

    def _audible(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if not self._tokenizer.is_silent(token_id, self._skip)]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)

    @staticmethod
    def _settled(text: str) -> str:
        # Only the last one can still become a character: what is before it ended where it began.
        return text.removesuffix(REPLACEMENT)

    def _forget_old(self) -> None:
        """Where the text is whole, the ids that came since it was last whole are context enough for the next ones."""
        self._window = self._window[self._num_old :]
        self._num_old = len(self._window)
        self._shown = self._decode()

    def _keep_last(self, count: int) -> None:
        """Shorten a window whose text does not become whole. UTF-8 finds its step again within one character."""
        self._window = self._window[-count:]
        self._num_old = 0
        self._shown = self._settled(self._decode())


def _common_length(one: str, other: str) -> int:
    """How many characters both begin with."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
