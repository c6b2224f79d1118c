# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SamplingParams`: how one request wants its tokens chosen and when it ends.

Rules: names and defaults are vLLM's; a value is checked and brought into one form when the object is made, so whoever
holds one holds a legal one; every refusal names the field, what was given, what is allowed and what to change. Each
list has a limit, so that a small request cannot order a large amount of work.

What it leaves out: everything that depends on the model (token ids within the vocabulary, the length limit), which
the scheduler checks. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metrale_ray.errors import RequestError

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
# Above 100 every distribution is flat; what is larger is a mistake.
MAX_TEMPERATURE = 100.0
# Each is searched for at each token; the front does this on one core for all of its requests.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """How tokens are chosen, and when the text ends. Every field may be given as a keyword; all have defaults.

    temperature: 0 to 100. 0 takes the most likely token (the lowest id on a tie); the logits are divided by the rest.
    top_k: keep the k most likely tokens; 0 keeps all, and so does -1, which becomes 0.
    top_p: above 0, at most 1. Keep the fewest most likely tokens whose probabilities reach it.
    seed: 0 to 2**64 - 1. The same seed, prompt and parameters give the same tokens. None: the engine chooses one.
    max_tokens: at most so many tokens are generated, from 1. None: as many as the model's length limit leaves.
    ignore_eos: go on after the model's end-of-sequence token.
    stop: texts that end the output, 16 of up to 256 characters each; a single str is taken as one.
    stop_token_ids: up to 128 token ids that end the output.

    Raises RequestError, with `param` naming the field.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    max_tokens: int | None
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        max_tokens: int | None = 16,
        ignore_eos: bool = False,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        values = {
            "temperature": _temperature(temperature),
            "top_k": _top_k(top_k),
            "top_p": _top_p(top_p),
            "seed": None if seed is None else _integer("seed", seed, 0, U64_MAX, "2**64 - 1"),
            "max_tokens": None if max_tokens is None else _integer("max_tokens", max_tokens, 1, U32_MAX, "2**32 - 1"),
            "ignore_eos": _flag("ignore_eos", ignore_eos),
            "stop": _stop(stop),
            "stop_token_ids": _stop_token_ids(stop_token_ids),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _temperature(value: object) -> float:
    number = _number("temperature", value, "a number from 0 to 100")
    if not 0.0 <= number <= MAX_TEMPERATURE:
        raise _refusal("temperature", value, "a number from 0 to 100", "0 for the most likely token, or 1")
    return number + 0.0  # -0.0 becomes 0.0


def _top_k(value: object) -> int:
    if value == -1 and type(value) is int:
        return 0
    return _integer("top_k", value, 0, U32_MAX, "2**32 - 1")


def _top_p(value: object) -> float:
    number = _number("top_p", value, "a number above 0 and at most 1")
    if not 0.0 < number <= 1.0:
        raise _refusal("top_p", value, "a number above 0 and at most 1", "1 to keep every token")
    return number


def _number(name: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(name, value, allowed, "a plain number")
    if isinstance(value, float) and not math.isfinite(value):
        raise _refusal(name, value, allowed, "a finite number")
    try:
        return float(value)
    except OverflowError:
        raise _refusal(name, value, allowed, "a smaller number") from None


def _integer(name: str, value: object, low: int, high: int, high_text: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refusal(name, value, f"an integer from {low} to {high_text}", "a value in that range, or leave it out")
    return int(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, value, "true or false", "one of these")
    return value


def _stop(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items("stop", value, MAX_STOP_STRINGS, "a string, or a list of")
    for text in texts:
        if not isinstance(text, str):
            raise _refusal("stop", text, "strings", "only strings")
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            allowed = f"strings of 1 to {MAX_STOP_CHARACTERS} characters"
            raise _refusal("stop", text, allowed, f"shorter ones that are not empty (this has {len(text)} characters)")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise _refusal("stop", text, "valid Unicode", "strings without lone surrogates")
    return tuple(str(text) for text in texts)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = _items("stop_token_ids", value, MAX_STOP_TOKEN_IDS, "a list of")
    return tuple(_integer("stop_token_ids", token_id, 0, U32_MAX, "2**32 - 1") for token_id in ids)


def _items(name: str, value: object, limit: int, kind: str) -> Sequence[object]:
    """`value` as a sequence of at most `limit` items, refused before any item is looked at."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise _refusal(name, value, f"{kind} at most {limit}", "a list or a tuple")
    if len(value) > limit:
        message = f"{name} has {len(value)} entries; allowed are at most {limit}; give fewer"
        raise RequestError(message, param=name)
    return value


def _refusal(name: str, given: object, allowed: str, change: str) -> RequestError:
    """The error for one field. What was given is shown in at most 60 characters, however large it is."""
    shown = _shown(given)
    return RequestError(f"{name} is {shown}; allowed is {allowed}; give {change}", param=name)


def _shown(given: object) -> str:
    if isinstance(given, int) and not isinstance(given, bool) and given.bit_length() > 128:
        return f"an integer of {given.bit_length()} bits"
    if isinstance(given, str | bytes | bytearray):
        given = given[:60]
    elif not isinstance(given, int | float | None):
        return f"of type {type(given).__name__}"
    text = ascii(given)
    return text if len(text) <= 60 else text[:57] + "..."
