# SPDX-License-Identifier: MIT OR Apache-2.0
"""From what a user gives to what is sent: prompts, parameters, priorities and time limits, checked and joined.

Rules. All prompts of a call are checked before any of them is sent. What is wrong with a prompt or a parameter refuses
the whole call, with the prompt's index where there are several. A prompt that is only too long for the model is no
mistake of that kind: it gets an error for an answer, and the others are answered. What is large is refused before any
work is spent on it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from metrale_ray.errors import RequestError
from metrale_ray.protocol.front import Opened
from metrale_ray.protocol.front.messages import MAX_TIMEOUT_S
from metrale_ray.protocol.front.params_map import PackedParams
from metrale_ray.protocol.limits import I32_MAX, I32_MIN
from metrale_ray.sampling import checks
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.serve.bad_words import bad_word_ids
from metrale_ray.serve.stop_strings import StopAutomaton
from metrale_ray.serve.structured import grammar_of
from metrale_ray.serve.text import Tokenizer
from metrale_ray.vocabulary import PROMPT, check_params, check_token_ids

Prompt = str | Sequence[int]
T = TypeVar("T")

CHARACTERS_PER_TOKEN = 256
"""More than any token of a usual vocabulary has: a longer text is too long without being looked at."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt and all that is asked of it. `text` is None when token ids were given.

    `sent` is the head's part of `params`, and `stops` finds their stop strings: both are made once for all prompts with
    the same parameters. `refusal`: why it is not sent at all, as (code, message).
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    sent: PackedParams
    stops: StopAutomaton
    priority: int = 0
    timeout_s: float | None = None
    refusal: tuple[str, str] | None = None


class Preparation:
    """Makes requests for one engine, of which `opened` tells the limits."""

    def __init__(self, tokenizer: Tokenizer | None, opened: Opened) -> None:
        self._tokenizer = tokenizer
        self._opened = opened

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
        timeout_s: float | Sequence[float | None] | None = None,
    ) -> list[PromptRequest]:
        """One request for each prompt, in order; the others are one for all prompts, or one for each.

        Raises RequestError, and then nothing was sent.
        """
        listed = listed_prompts(prompts)
        count = len(listed)
        all_params = _one_each("sampling_params", SamplingParams() if params is None else params, count)
        ready = self._all_ready(all_params, are_many=_is_sequence(params))
        priorities, timeouts_s = _one_each("priority", priority, count), _one_each("timeout_s", timeout_s, count)
        found = []
        for index, prompt in enumerate(listed):
            with _named(index, are_many=count > 1):
                text, token_ids, refusal = self._tokens(prompt)
                found.append(
                    PromptRequest(
                        text,
                        token_ids,
                        all_params[index],
                        *ready[id(all_params[index])],
                        check_priority(priorities[index]),
                        check_timeout_s(timeouts_s[index]),
                        refusal,
                    )
                )
        return found

    def _all_ready(
        self, all_params: Sequence[SamplingParams], *, are_many: bool
    ) -> dict[int, tuple[PackedParams, StopAutomaton]]:
        """What is made of each, by identity: most calls give the same parameters to all prompts."""
        ready: dict[int, tuple[PackedParams, StopAutomaton]] = {}
        for index, params in enumerate(all_params):
            if id(params) not in ready:
                with _named(index, are_many=are_many):
                    ready[id(params)] = PackedParams(self._sent(params)), StopAutomaton(params.stop)
        return ready

    def _sent(self, params: SamplingParams) -> TokenParams:
        if not isinstance(params, SamplingParams):
            raise checks.refusal("sampling_params", params, "SamplingParams", "one, or a list with one for each prompt")
        check_params(params, self._opened.vocab_size)
        outputs = params.structured_outputs
        grammar = None if outputs is None else grammar_of(outputs, self._tokenizer)
        if self._tokenizer is None:
            _check_no_texts(params)
            return params.for_tokens(grammar=grammar)
        ends = [token_id for token_id in self._tokenizer.eos_token_ids if token_id < self._opened.vocab_size]
        bad_ids = bad_word_ids(params.bad_words, self._tokenizer, self._opened.vocab_size)
        return params.for_tokens(bad_ids, sorted(ends), grammar)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...], tuple[str, str] | None]:
        """The prompt's text and ids, and why it is too long, if it is."""
        most = self._opened.max_model_len - 1  # the answer has at least one
        text = prompt if isinstance(prompt, str) else None
        if text is not None and len(text) > self._opened.max_model_len * CHARACTERS_PER_TOKEN:
            return text, (), self._too_long(f"{len(text)} characters", f"{most} tokens")
        token_ids = self._encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        if not token_ids:
            raise RequestError(
                "the prompt has 0 tokens; it must have at least 1, so give it some text",
                code="empty_prompt",
                param="prompt",
            )
        if len(token_ids) > most:
            return text, token_ids, self._too_long(f"{len(token_ids)} tokens", str(most))
        check_token_ids(PROMPT, token_ids, self._opened.vocab_size)
        return text, token_ids, None

    def _too_long(self, given: str, allowed: str) -> tuple[str, str]:
        """The refusal that the head would give."""
        return (
            "context_length_exceeded",
            f"the prompt has {given}; at most {allowed} are allowed, as max_model_len is "
            f"{self._opened.max_model_len} and counts the answer too. Shorten the prompt.",
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer files: give token ids instead of text", param="prompt")
        return tuple(self._tokenizer.encode(text))


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a text, or a flat list of token ids, is one. Raises RequestError."""
    if isinstance(prompts, str) or (_is_sequence(prompts) and bool(prompts) and _are_ids(prompts)):
        return [prompts]  # type: ignore[list-item]  # just seen to be one prompt
    if not _is_sequence(prompts):
        raise _no_prompt("the prompt", prompts)
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not (_is_sequence(prompt) and _are_ids(prompt)):
            raise _no_prompt(f"prompt {index}", prompt)
    return list(prompts)  # type: ignore[arg-type]


def check_priority(value: int) -> int:
    """`value`, if it is a priority: the lower number goes first. Raises RequestError."""
    return checks.integer("priority", value, I32_MIN, I32_MAX)


def check_timeout_s(value: float | None) -> float | None:
    """`value`, if it is a time limit in seconds, or None for no limit. Raises RequestError."""
    if value is None:
        return None
    return checks.number("timeout_s", value, 0, MAX_TIMEOUT_S, "seconds, or nothing for no limit", above=True)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _are_ids(values: Any) -> bool:
    kinds = set(map(type, values))
    return kinds <= {int} or all(issubclass(kind, int) and kind is not bool for kind in kinds)


def _no_prompt(name: str, given: object) -> RequestError:
    return RequestError(
        f"{name} is {_shown(given)}, which is no prompt: give a text, a list of token ids, or a list of these",
        param="prompt",
    )


def _shown(given: object) -> str:
    """What was given, in a few words, however large it is."""
    try:
        return reprlib.repr(given)
    except ValueError:  # an integer of thousands of digits is somewhere in it
        return f"of type {type(given).__name__}"


def _one_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    if not _is_sequence(given):
        return [given] * count  # type: ignore[list-item]  # not a sequence, so one
    several: Sequence[T] = given  # type: ignore[assignment]
    if len(several) != count:
        raise RequestError(
            f"{name} has {len(several)} entries for {count} prompts; give one for all, or one for each", param=name
        )
    return several


@contextmanager
def _named(index: int, *, are_many: bool) -> Iterator[None]:
    """Put the prompt's index before a refusal."""
    try:
        yield
    except RequestError as error:
        if not are_many:
            raise
        raise RequestError(f"prompt {index}: {error.message}", code=error.code, param=error.param) from error


def _check_no_texts(params: SamplingParams) -> None:
    for name, instead in (("stop", "stop_token_ids"), ("bad_words", "bad_token_ids")):
        if getattr(params, name):
            raise RequestError(f"{name} needs a tokenizer, and this checkpoint has none; use {instead}", param=name)
