# SPDX-License-Identifier: MIT OR Apache-2.0
"""What of one request names tokens, held against the model's vocabulary.

Rules: a token id that the model does not have is refused before anything of the request is sent to a rank, naming the
field, the id and what is allowed. The tokenizer's own end ids are dropped instead: a tokenizer may know more tokens
than its model, and nobody chose them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from metrale_ray.errors import RequestError
from metrale_ray.sampling.token_params import TokenParams


def check_vocabulary(prompt_token_ids: Sequence[int], params: TokenParams, vocab_size: int) -> None:
    """Raise RequestError, with `param` naming the field, if some token id is not from 0 to `vocab_size` - 1."""
    for param, token_ids in _named(prompt_token_ids, params):
        highest, lowest = max(token_ids, default=0), min(token_ids, default=0)
        wrong = highest if highest >= vocab_size else lowest
        if not 0 <= wrong < vocab_size:
            raise RequestError(
                f"{param} holds {wrong}; token ids of this model are 0 to {vocab_size - 1}. "
                "Use the checkpoint's own tokenizer.",
                param=param,
            )


def within(token_ids: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Those of `token_ids` that the model has."""
    return frozenset(token_id for token_id in token_ids if 0 <= token_id < vocab_size)


def _named(prompt_token_ids: Sequence[int], params: TokenParams) -> Iterator[tuple[str, Sequence[int]]]:
    yield "prompt_token_ids", prompt_token_ids
    yield "stop_token_ids", params.stop_token_ids
    yield "logit_bias", [token_id for token_id, _ in params.logit_bias]
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "bad_token_ids", tuple(chain.from_iterable(params.bad_token_ids))
