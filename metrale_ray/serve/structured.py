# SPDX-License-Identifier: MIT OR Apache-2.0
"""From structured outputs to the grammar that the head compiles, and `GrammarChecks`, which look at it before.

Rules. A text from a stranger is compiled in a process of its own first, within limits of time and memory, as there is
no other way to stop a compiler, and what ends it must not end a service. What passed lately is known and not looked at
again. Large texts have another process than small ones, so that they hold up only their like; small ones have two, so
that one of them that takes long does not hold up the next, and one of these takes only short texts. Each starts when it
is first needed.

Leaves out: what a grammar means (`grammar`), and how the head bounds what it compiles.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict

from metrale_ray.errors import MetraleError, RequestError
from metrale_ray.grammar import texts
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.templates.cell import Cell, CellBusy, CellEnded, CellMissing, CellSlow
from metrale_ray.serve.templates.outcome import MAX_REASON_CHARACTERS, Outcome
from metrale_ray.serve.text import Tokenizer

INVALID = "invalid_grammar"
PARAM = "structured_outputs"
MODULE = "metrale_ray.serve.grammar_cell"

CELL_BYTES = 2 * 2**30
"""Address space: half a gigabyte of it is a stack that is hardly used, and a usual grammar takes some megabytes."""

LARGE_CHARACTERS = 16 * 1024
"""From here on a text may take as long as is allowed, so it is looked at apart from the others."""

SHORT_CHARACTERS = 4 * 1024
"""Below it a text is checked in some milliseconds: many longer ones at once may not make it wait."""

MAX_KNOWN = 256
"""Texts that passed lately, some kilobytes each."""

MAX_ANSWER_BYTES = 4 * MAX_REASON_CHARACTERS


def grammar_of(outputs: StructuredOutputs, tokenizer: Tokenizer | None) -> str:
    """The text of the grammar. Raises RequestError, with the param "structured_outputs"."""
    try:
        part = _part(outputs)
    except RequestError as error:
        raise RequestError(error.message, code=error.code, param=PARAM) from error
    return texts.grammar_text(part, _mark(outputs.after, tokenizer), _mark(outputs.opening, tokenizer))


def _mark(text: str | None, tokenizer: Tokenizer | None) -> texts.Mark | None:
    return None if text is None else texts.Mark(text, None if tokenizer is None else tokenizer.special_token_id(text))


def _part(outputs: StructuredOutputs) -> texts.Part:
    match outputs.kind:
        case "json":
            return texts.of_json(outputs.json or "")
        case "json_object":
            return texts.of_json(texts.ANY_OBJECT)
        case "regex":
            return texts.of_regex(outputs.regex or "")
        case "choice":
            return texts.of_choice(outputs.choice or ())
    return texts.of_grammar(outputs.grammar or "")


class GrammarChecks:
    """The checks of one service. Of one event loop; `close` it in the end."""

    def __init__(self, limits: ServeLimits) -> None:
        self._timeout_s = limits.grammar_timeout_s
        self._short, self._small, self._large = (Cell(CELL_BYTES, module=MODULE) for _ in range(3))
        self._known: OrderedDict[str, None] = OrderedDict()

    def close(self) -> None:
        """End the processes, now. Whoever waits gets an error. Idempotent."""
        for cell in (self._short, self._small, self._large):
            cell.close()

    async def checked(self, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
        """`params` with the grammar that its structured outputs are, which has been looked at; off the event loop.

        Raises RequestError: code "invalid_grammar" for one that makes no sense or costs too much, "too_many_requests"
        when others take too long before it. Raises MetraleError when no process can be started.
        """
        outputs = params.structured_outputs
        if outputs is None:
            return params
        text = await asyncio.to_thread(grammar_of, outputs, tokenizer)
        await self.check(text)
        return dataclasses.replace(params, structured_outputs=None, grammar=text)

    async def check(self, text: str) -> None:
        """Whether the text of a grammar makes sense, within the limits. Raises as `checked` does."""
        if text in self._known:
            self._known.move_to_end(text)
            return
        reason = await self._reason(text)
        if reason:
            raise RequestError(reason, code=INVALID, param=PARAM)
        self._known[text] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _cell(self, text: str) -> Cell:
        """What looks at the text: of those that may, the one with the shortest line."""
        if len(text) >= LARGE_CHARACTERS:
            return self._large
        cells = (self._small, self._short) if len(text) < SHORT_CHARACTERS else (self._small,)
        return min(cells, key=lambda cell: cell.num_in_line)

    async def _reason(self, text: str) -> str:
        """Why it is refused, or nothing."""
        try:
            outcome, content = await self._cell(text).work(text.encode(), self._timeout_s, MAX_ANSWER_BYTES)
        except CellBusy as error:
            raise RequestError(
                f"the grammar cannot be looked at: {error}, as others took too long before it. Try again.",
                code="too_many_requests",
                param=PARAM,
            ) from error
        except CellSlow:
            return f"the grammar takes more than {self._timeout_s:g} s to compile, which is the limit; make it simpler"
        except CellEnded as error:
            return f"the grammar is refused: the process that compiles it ended ({error}); make it simpler"
        except CellMissing as error:
            raise MetraleError(f"no process can be started to look at grammars: {error}") from error
        return "" if outcome is Outcome.TEXT else content.decode(errors="replace")
