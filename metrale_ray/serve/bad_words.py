# SPDX-License-Identifier: MIT OR Apache-2.0
"""Words that may not be written, as the sequences of token ids that would write them.

Rules. A word is banned at the start of a text and behind a space, as in vLLM: its ids without and with a leading space,
the latter only where they do not end with the former, which ban it already. Of a sequence only the last token is
banned, and only behind the others: what a word is spelled with stays possible, and so does another spelling of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from metrale_ray.errors import RequestError
from metrale_ray.sampling.token_params import MAX_BAD_SEQUENCE_TOKENS
from metrale_ray.serve.text import Tokenizer

TokenIds = tuple[int, ...]


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[TokenIds, ...]:
    """The sequences of token ids to ban, in the order of `words`, each once. Raises RequestError.

    A sequence with an id that the model does not have (it has 0 to `vocab_size` - 1) can never come and is left out.
    """
    found = dict.fromkeys(token_ids for word in words for token_ids in _spellings(word, tokenizer))
    return tuple(token_ids for token_ids in found if max(token_ids) < vocab_size)


def _spellings(word: str, tokenizer: Tokenizer) -> list[TokenIds]:
    bare = word.lstrip()
    if not bare:
        return [_ids(word, word, tokenizer)]  # nothing but spaces: banned as it is
    first, behind_space = _ids(bare, word, tokenizer), _ids(" " + bare, word, tokenizer)
    return [first] if behind_space[-len(first) :] == first else [first, behind_space]


def _ids(text: str, word: str, tokenizer: Tokenizer) -> TokenIds:
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not 1 <= len(token_ids) <= MAX_BAD_SEQUENCE_TOKENS:
        shown = ascii(word if len(word) <= 40 else word[:37] + "...")
        raise RequestError(
            f"bad_words holds {shown}, which is {len(token_ids)} tokens for this model; allowed are words of 1 to "
            f"{MAX_BAD_SEQUENCE_TOKENS} tokens; give a shorter one, or leave it out",
            param="bad_words",
        )
    return token_ids
