# SPDX-License-Identifier: MIT OR Apache-2.0
"""llguidance, which is imported when the first grammar comes, so that an engine starts and serves without it."""

from __future__ import annotations

import json
import os
from types import ModuleType

from metrale_ray.errors import RequestError

INVALID = "invalid_grammar"
"""The code of every refusal of a grammar."""

# How much one grammar may cost. The numbers are llguidance's own units: about 50 000 units of the lexer's first fuel
# and 14 000 of a step's take 1 ms, 20 000 items take 1 ms.
MAX_GRAMMAR_SYMBOLS = 20_000  # a schema of 2000 optional properties, or a hundred tools, in up to 2 s
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_ITEMS_IN_ROW = 10_000  # alternatives at one place; 4 for each of a schema's optional properties
MAX_LEXER_STATES = 100_000  # 1 to 2 KB each


def llguidance() -> ModuleType:
    """The library. Raises RequestError, which says how to install it, where it is not there."""
    # With backtraces each level of a deep error takes one, and a small text takes minutes to be refused.
    os.environ.setdefault("RUST_LIB_BACKTRACE", "0")
    try:
        import llguidance as library
    except ImportError as error:
        raise RequestError(
            f"structured outputs need the package llguidance, which cannot be imported here ({error}); "
            'install "metrale-ray[serve]"',
            code=INVALID,
        ) from error
    return library


def parser_limits() -> object:
    """llguidance's limits of one grammar, as above; its errors leave the parser's state out."""
    return llguidance().LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_items_in_row=MAX_ITEMS_IN_ROW,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def lark_string(text: str) -> str:
    """`text` as a literal of Lark: as in JSON, but that one character of those that JSON takes is not taken."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def invalid(message: str) -> RequestError:
    """The refusal of a grammar that llguidance explains so."""
    return RequestError(f"the grammar is refused: {_short(message)}", code=INVALID)


def _short(message: str, max_characters: int = 500) -> str:
    text = " ".join(message.replace("<non-verbose/>", "").split())
    if text.startswith("NoExtension"):
        return "it allows no text"
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."
