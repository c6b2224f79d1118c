# SPDX-License-Identifier: MIT OR Apache-2.0
"""What of one request names tokens, held against the model's vocabulary.

Rules: a token id that the model does not have is refused before anything of the request is sent to a rank, naming the
field, the id and what is allowed. The tokenizer's own end ids are dropped instead: a tokenizer may know more tokens
than its model, and nobody chose them. A front and the head keep this one rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from metrale_ray.errors import RequestError
from metrale_ray.sampling.token_params import TokenParams

PROMPT = "prompt_token_ids"


def check_vocabulary(prompt_token_ids: Sequence[int], params: TokenParams, vocab_size: int) -> None:
    """Raise RequestError, with `param` naming the field, if some token id is not from 0 to `vocab_size` - 1."""
    check_token_ids(PROMPT, prompt_token_ids, vocab_size)
    check_params(params, vocab_size)


def check_params(params: TokenParams, vocab_size: int) -> None:
    """`check_vocabulary` of parameters alone, whose prompts are looked at one by one."""
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("bad_token_ids", tuple(chain.from_iterable(params.bad_token_ids)), vocab_size)


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError, naming `param`, if some id is not from 0 to `vocab_size` - 1."""
    highest, lowest = max(token_ids, default=0), min(token_ids, default=0)
    wrong = highest if highest >= vocab_size else lowest
    if not 0 <= wrong < vocab_size:
        # A front is given integers of any size, and some are too long to be written out.
        shown = wrong if abs(wrong) < 2**64 else f"an integer of {wrong.bit_length()} bits"
        raise RequestError(
            f"{param} holds {shown}; token ids of this model are 0 to {vocab_size - 1}. "
            "Use the checkpoint's own tokenizer.",
            param=param,
        )


def within(token_ids: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Those of `token_ids` that the model has."""
    return frozenset(token_id for token_id in token_ids if 0 <= token_id < vocab_size)
