# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Grammars`: compiles the grammars of requests for one checkpoint.

Rules: `compile` may be called in any thread and holds Python's lock for no long time. What a text that makes sense
takes is bounded by the limits in `library`: in symbols, in states and in steps. The tokenizer is loaded by `prepare`,
or when the first grammar comes. What was compiled lately is kept and copied, as many requests have the same schema.

What it leaves out: who waits for how long (`compiling`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.grammar.check import check_parts
from metrale_ray.grammar.constraint import SLOW_MASK_S, Constraint, Vocabulary, new_vocabulary
from metrale_ray.grammar.deep_stack import with_deep_stack
from metrale_ray.grammar.library import INVALID, invalid, llguidance, parser_limits

log = logging.getLogger(__name__)

MAX_KEPT = 32
"""Compiled grammars that are kept. One takes some hundred kilobytes."""

TOKENIZER_FILE = "tokenizer.json"


class Grammars:
    """For the checkpoint in `folder`, a model of `vocab_size` ids, of which `eos_token_ids` end a text."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._file = folder / TOKENIZER_FILE
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._refusal: str | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[str, Constraint] = OrderedDict()
        self._keeping = threading.Lock()

    def compile(self, text: str) -> Constraint:
        """The grammar of `text` at its beginning, for one sequence.

        Raises RequestError with the code "invalid_grammar": for a text that makes no sense or costs too much, and where
        this engine can compile none.
        """
        kept = self.kept(text)
        if kept is None:
            made = self._compiled(text, self.load())
            self._keep(text, made)
            return made.copy(())
        return kept

    def kept(self, text: str) -> Constraint | None:
        """The same at once where it was compiled lately, else None."""
        with self._keeping:
            found = self._kept.get(text)
            if found is not None:
                self._kept.move_to_end(text)
        return None if found is None else found.copy(())

    def prepare(self) -> None:
        """Read the tokenizer before there is anything to hold up: it takes Python's lock for a second or more.

        Raises nothing: where that is not possible, whoever asks for a grammar is told.
        """
        with contextlib.suppress(RequestError):
            self.load()

    def load(self) -> Vocabulary:
        """The tokenizer, read at the first call. Raises RequestError where that failed, for whatever reason.

        It is not tried again: the files do not change under an engine, and each try would hold it up.
        """
        with self._loading:
            if self._refusal is not None:
                raise RequestError(self._refusal, code=INVALID)
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._new_vocabulary()
                except RequestError as error:
                    self._refusal = error.message
                    raise
            return self._vocabulary

    def _new_vocabulary(self) -> Vocabulary:
        try:
            return new_vocabulary(self._read_tokenizer(), self._vocab_size, os.cpu_count() or 1)
        except (RequestError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            log.error("no structured outputs: the tokenizer for grammars could not be read", exc_info=error)
            raise RequestError(
                f"structured outputs are not possible here: reading {TOKENIZER_FILE} for them failed: "
                f"{type(error).__name__}: {error}",
                code=INVALID,
            ) from error

    def _read_tokenizer(self) -> Any:
        """As many ids as the model or the tokenizer has, whichever are more."""
        library = llguidance()
        if not self._file.is_file():
            raise RequestError(
                f"structured outputs need the file {TOKENIZER_FILE}, which this checkpoint does not have; "
                "save its tokenizer in that form beside the weights",
                code=INVALID,
            )
        eos_token_ids = self._eos_token_ids or None
        try:
            own = library.LLTokenizer(str(self._file), eos_token=eos_token_ids)
            if own.vocab_size >= self._vocab_size:
                return own
            return library.LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=eos_token_ids)
        except ValueError as error:
            raise RequestError(
                f"structured outputs are not possible with this checkpoint: llguidance cannot use its "
                f"{TOKENIZER_FILE}: {error}",
                code=INVALID,
            ) from error

    def _compiled(self, text: str, vocabulary: Vocabulary) -> Constraint:
        """Ready for its first token: much of the work is done when the first mask is asked for."""
        check_parts(text)
        matcher, mask_s = with_deep_stack(lambda: _first_mask(vocabulary, text))
        if matcher.is_error():
            raise invalid(matcher.get_error())
        if mask_s > SLOW_MASK_S:
            raise invalid(f"each token takes {mask_s:.3f} s, and {SLOW_MASK_S} s are allowed; make it simpler")
        return Constraint(matcher, vocabulary)

    def _keep(self, text: str, constraint: Constraint) -> None:
        with self._keeping:
            self._kept[text] = constraint
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)


def _first_mask(vocabulary: Vocabulary, text: str) -> tuple[Any, float]:
    """The matcher of a grammar, and the CPU seconds of a mask once it has been asked for the first."""
    matcher = llguidance().LLMatcher(vocabulary.tokenizer, text, limits=parser_limits(), log_level=0)
    if matcher.is_error():
        return matcher, 0.0
    matcher.compute_bitmask()
    started_s = time.thread_time()
    matcher.compute_bitmask()
    return matcher, time.thread_time() - started_s
