# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Constraint`: one sequence's place in its grammar, and `masks`: what the sequences of a step may go on with.

Rules: it moves on only by tokens that were kept, so it may be asked for its mask again and again, and it survives
whatever happens to slots and steps. End ids are allowed exactly where the grammar may end. Ids that the tokenizer does
not know are never allowed. When a grammar passes its limits inside a step, its sequence has an error and the others
have not.

Shapes: R rows, V the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale_ray.grammar.library import llguidance

MAX_MASK_THREADS = 8
"""Threads that compute the masks of one step. A mask takes well under a millisecond; more would only be in the way."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as llguidance has it, and what its constraints share. `size` is V."""

    tokenizer: Any
    executor: Any
    size: int


class Constraint:
    """For one sequence, which ends by one of `end_token_ids`; `goes_on`: it ends only where it must."""

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, end_token_ids: Iterable[int] = (), *, goes_on: bool = False
    ) -> None:
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.end_ids = np.array(sorted(end_token_ids), dtype=np.int64)
        self.goes_on = goes_on

    def copy(self, end_token_ids: Iterable[int], *, goes_on: bool = False) -> Constraint:
        """The same place in the grammar for another sequence."""
        return Constraint(self.matcher.deep_copy(), self.vocabulary, end_token_ids, goes_on=goes_on)

    def advance(self, token_id: int) -> None:
        """The sequence goes on with this token, which the mask allowed and which is no end."""
        self.matcher.consume_token(token_id)

    @property
    def may_end(self) -> bool:
        """Whether the text so far is whole."""
        return bool(self.matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """Why it cannot go on, or None."""
        return str(self.matcher.get_error()).strip() if self.matcher.is_error() else None


def masks(constraints: Sequence[Constraint]) -> list[NDArray[np.bool_] | str]:
    """For each the tokens that it allows next (bool, [V]), or why it cannot go on.

    All of one vocabulary. In threads, without Python's lock: they take about as long as the slowest.
    """
    if not constraints:
        return []
    vocabulary = constraints[0].vocabulary
    bits_RW = np.zeros((len(constraints), (vocabulary.tokenizer.vocab_size + 31) // 32), dtype=np.int32)
    _fill(constraints, vocabulary, bits_RW)
    return [_mask(constraint, bits_W) for constraint, bits_W in zip(constraints, bits_RW, strict=True)]


def _fill(constraints: Sequence[Constraint], vocabulary: Vocabulary, bits_RW: NDArray[np.int32]) -> None:
    row_bytes = bits_RW.shape[1] * bits_RW.itemsize
    if len(constraints) == 1:
        constraints[0].matcher.unsafe_compute_mask_ptr(bits_RW.ctypes.data, row_bytes)
        return
    matchers = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
    vocabulary.executor.unsafe_compute_mask_ptr(matchers, bits_RW.ctypes.data, row_bytes, len(constraints))


def _mask(constraint: Constraint, bits_W: NDArray[np.int32]) -> NDArray[np.bool_] | str:
    error = constraint.error
    if error is not None:
        return error
    vocabulary, ends = constraint.vocabulary, constraint.end_ids
    found = np.unpackbits(bits_W.view(np.uint8), bitorder="little")[: vocabulary.size].astype(np.bool_)
    mask_V = np.zeros(vocabulary.size, dtype=np.bool_)
    mask_V[: found.size] = found
    mask_V[[token_id for token_id in vocabulary.tokenizer.eos_tokens if token_id < vocabulary.size]] = False
    mask_V[ends] = constraint.may_end and not (constraint.goes_on and mask_V.any())
    return mask_V


def new_vocabulary(tokenizer: Any, size: int, num_threads: int) -> Vocabulary:
    """For a model of `size` ids."""
    threads = max(1, min(MAX_MASK_THREADS, num_threads))
    return Vocabulary(tokenizer, llguidance().LLExecutor(num_threads=threads), size)
