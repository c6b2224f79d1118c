# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Prepared`: what a request's parameters say about single tokens, as arrays, made once per request.

Rules: it depends on the parameters alone, so all sequences of a request share it and no step builds it again. What
changes nothing (a bias of 0, an empty list) is left out, so that it costs nothing.

What it leaves out: everything that depends on the tokens so far or on the model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metrale_ray.sampling.history import TokenHistory
from metrale_ray.sampling.token_params import TokenParams


class Prepared:
    """The allowed and the bad token ids and the biases of one `TokenParams`."""

    def __init__(self, params: TokenParams) -> None:
        biases = [(token_id, bias) for token_id, bias in params.logit_bias if bias != 0.0]
        self.bias_ids = np.array([token_id for token_id, _ in biases], dtype=np.int64)
        self.bias_values = np.array([bias for _, bias in biases], dtype=np.float32)
        self.allowed_ids: NDArray[np.int64] | None = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = np.array(params.allowed_token_ids, dtype=np.int64)
        single = [sequence[0] for sequence in params.bad_token_ids if len(sequence) == 1]
        self.bad_ids = np.array(single, dtype=np.int64)
        self._bad_after = _by_last_token(params.bad_token_ids)
        self.changes_logits = bool(
            biases or single or self._bad_after or self.allowed_ids is not None or params.has_penalties
        )

    def bad_ids_after(self, history: TokenHistory) -> list[int]:
        """The tokens that would complete a bad sequence of two or more, given what was generated."""
        last = history.last_token_id
        by_length = self._bad_after.get(last) if last is not None else None
        if by_length is None:
            return []
        tail = history.tail()
        found: list[int] = []
        for length, by_beginning in by_length.items():
            found += by_beginning.get(tail[-length:], ())
        return found


def prepared(params: TokenParams) -> Prepared:
    """What belongs to `params`, made at the first call and kept with them."""
    made: Prepared | None = getattr(params, "memo", None)
    if made is None:
        made = Prepared(params)
        object.__setattr__(params, "memo", made)
    return made


def _by_last_token(sequences: tuple[tuple[int, ...], ...]) -> dict[int, dict[int, dict[tuple[int, ...], list[int]]]]:
    """For each beginning (all but the last token of a sequence of two or more) the tokens that complete one.

    Found by the beginning's own last token, then by its length, then by itself: a look-up per length, however many
    sequences there are.
    """
    found: dict[int, dict[int, dict[tuple[int, ...], list[int]]]] = {}
    for sequence in sequences:
        if len(sequence) > 1:
            beginning = sequence[:-1]
            by_beginning = found.setdefault(beginning[-1], {}).setdefault(len(beginning), {})
            by_beginning.setdefault(beginning, []).append(sequence[-1])
    return found
