# SPDX-License-Identifier: MIT OR Apache-2.0
"""The bytes that one token stands for, a part of a character too.

Rules. A token whose text by itself is whole stands for that text. One that shows a replacement character is looked up
in its vocabulary: byte-level tokenizers write each byte as a printable character, those with byte fallback as
`<0xE2>`. What is neither stands for the text that it shows.
"""

from __future__ import annotations

import functools
import re

from metrale_ray.serve.text import REPLACEMENT, Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_byte_values(tokenizer: Tokenizer, token_id: int) -> list[int]:
    """The bytes as JSON has them, looked up once for each token. The list is shared: nobody changes it."""
    found = tokenizer.known_bytes.get(token_id)
    if found is None:
        found = tokenizer.known_bytes[token_id] = list(token_bytes(tokenizer, token_id))
    return found


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of `token_id`; none for an id that stands for no token."""
    text = tokenizer.token_text(token_id)
    if REPLACEMENT not in text:
        return text.encode()
    entry = str(tokenizer.inner.convert_ids_to_tokens(token_id))
    byte_token = _BYTE_TOKEN.fullmatch(entry)
    if byte_token is not None:
        return bytes.fromhex(byte_token[1])
    values = [_byte_values().get(character) for character in entry]
    found = bytes(value for value in values if value is not None)
    is_entry = None not in values and found.decode(errors="replace") == text
    return found if is_entry else text.encode()


@functools.cache
def _byte_values() -> dict[str, int]:
    """From the characters of byte-level vocabularies to bytes, as in "Language models are unsupervised multitask
    learners" (GPT-2): printable ones stand for themselves, the others for those from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}
