# SPDX-License-Identifier: MIT OR Apache-2.0
"""`TokenParams`: how one request wants its tokens chosen and when it ends, in tokens and numbers alone.

It is what the head needs and all that crosses the wire. Rules: names and defaults are vLLM's; a value is checked and
brought into one form when the object is made, so whoever holds one holds a legal one; every refusal names the field,
what was given, what is allowed and what to change. Each list has a limit, so that a small request cannot order a
large amount of work.

What it leaves out: texts (`SamplingParams` has them), and everything that depends on the model (token ids within the
vocabulary, the length limit), which the head checks. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from metrale_ray.sampling import checks
from metrale_ray.sampling.checks import U32_MAX, U64_MAX

MAX_N = 64
"""Sequences of one request: each is a request of its own for the engine, so one call cannot fill the queue."""

MAX_TEMPERATURE = 100.0
"""Above it every distribution is flat; what is larger is a mistake."""

MAX_STOP_TOKEN_IDS = 128
"""Each is looked up at each token; no tokenizer has so many that end a text."""

MAX_REPETITION_PENALTY = 100.0
"""Above it a token that has occurred can hardly occur again; what is larger is a mistake."""

MAX_ADDED_PENALTY = 2.0
"""Presence and frequency penalty, up and down: the range of OpenAI's and vLLM's."""

MAX_BIAS = 100.0
"""Up and down: what OpenAI's interface takes. It decides between any two tokens of a usual model."""

MAX_LOGIT_BIASES = 1024
"""OpenAI's interface takes 300; each is one addition per token."""

MAX_ALLOWED_TOKEN_IDS = 2**17
"""Half a megabyte of a frame. Who allows more of a vocabulary of 150 000 forbids the others by a bias."""

MAX_BAD_SEQUENCES = 2000
"""What 1000 bad words become: each as it stands, and with a space before it."""

MAX_BAD_SEQUENCE_TOKENS = 64
"""Tokens of one bad sequence: a word of 256 characters hardly has more."""

MAX_END_TOKEN_IDS = 64
"""A tokenizer names a handful of tokens that end a text."""

MAX_GRAMMAR_CHARS = 2**18
"""A quarter of a million characters: the largest schema or grammar that a front takes, with what is put around it."""

MAX_LOGPROBS = 20
"""Candidates that are told of per token: OpenAI's and vLLM's limit."""


class TokenFields(TypedDict, total=False):
    """The keyword arguments of `TokenParams`, for those who pass them on."""

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int] | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None
    allowed_token_ids: Sequence[int] | None
    bad_token_ids: Sequence[Sequence[int]] | None
    end_token_ids: Sequence[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: str | None


class Memo:
    """One place that is no field: where the sampler keeps what it has prepared from the values, as tensors.

    It takes no part in comparing, copying and pickling.
    """

    __slots__ = ("memo",)

    memo: Any


@dataclass(frozen=True, slots=True, init=False)
class TokenParams(Memo):
    """How tokens are chosen, and when the sequence ends. Every field may be given as a keyword; all have defaults.

    n: 1 to 64 sequences for one prompt.
    temperature: 0 to 100. 0 takes the most likely token (the lowest id on a tie); the logits are divided by the rest.
    top_k: keep the k most likely tokens; 0 keeps all, and so does -1, which becomes 0.
    top_p: above 0, at most 1. Keep the fewest most likely tokens whose probabilities reach it.
    min_p: 0 to 1. Keep the tokens that are at least so many times as likely as the most likely one.
    seed: 0 to 2**64 - 1. The same seed, prompt and parameters give the same tokens. None: the engine chooses one.
    max_tokens: at most so many tokens are generated, from 1. None: as many as the model's length limit leaves.
    min_tokens: the sequence does not end by a token before it has so many; at most `max_tokens`.
    ignore_eos: go on after an end-of-sequence token.
    stop_token_ids: up to 128 token ids that end the sequence.
    repetition_penalty: above 0, at most 100. The logits of tokens in the prompt or the output are divided by it when
        positive and multiplied when negative. 1 changes nothing.
    presence_penalty, frequency_penalty: -2 to 2. Taken from the logits of the output's tokens: once, and as often as
        each occurs. 0 changes nothing.
    logit_bias: up to 1024 token ids and what to add to their logits, -100 to 100; a mapping, kept as pairs in order
        of the ids. JSON's decimal strings are taken as ids.
    allowed_token_ids: up to 2**17 token ids, of which alone the output may consist. None: all.
    bad_token_ids: up to 2000 sequences of 1 to 64 token ids; the last one is not chosen where the output ends with
        the others.
    end_token_ids: up to 64 token ids that the tokenizer ends a text with; unless `ignore_eos` they end the sequence.
    logprobs: 0 to 20. Tell each token's log probability, and those of so many most likely ones. None: tell nothing.
    prompt_logprobs: 0 to 20. The same for each token of the prompt but the first.
    grammar: up to 2**18 characters: llguidance's text of a grammar, which the output's text must follow. End tokens
        are allowed exactly where it may end, and end the sequence even if `ignore_eos`; where nothing but the end is
        possible the sequence ends, even before `min_tokens`. None: no grammar.

    Raises RequestError, with `param` naming the field.
    """

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    bad_token_ids: tuple[tuple[int, ...], ...]
    end_token_ids: tuple[int, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: str | None

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_token_ids: Sequence[Sequence[int]] | None = None,
        end_token_ids: Sequence[int] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: str | None = None,
    ) -> None:
        values = {
            "n": checks.integer("n", n, 1, MAX_N),
            "temperature": checks.number("temperature", temperature, 0, MAX_TEMPERATURE, "0 for the likeliest, or 1"),
            "top_k": _top_k(top_k),
            "top_p": checks.number("top_p", top_p, 0, 1, "1 to keep every token", above=True),
            "min_p": checks.number("min_p", min_p, 0, 1, "0 to keep every token"),
            "seed": checks.optional_integer("seed", seed, 0, U64_MAX),
            "max_tokens": checks.optional_integer("max_tokens", max_tokens, 1, U32_MAX),
            "min_tokens": _min_tokens(min_tokens, max_tokens),
            "ignore_eos": checks.flag("ignore_eos", ignore_eos),
            "stop_token_ids": checks.token_ids("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS),
            "repetition_penalty": _repetition_penalty(repetition_penalty),
            "presence_penalty": _added_penalty("presence_penalty", presence_penalty),
            "frequency_penalty": _added_penalty("frequency_penalty", frequency_penalty),
            "logit_bias": checks.biases("logit_bias", logit_bias, MAX_LOGIT_BIASES, MAX_BIAS),
            "allowed_token_ids": _allowed_token_ids(allowed_token_ids),
            "bad_token_ids": checks.token_sequences(
                "bad_token_ids", bad_token_ids, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS
            ),
            "end_token_ids": checks.token_ids("end_token_ids", end_token_ids, MAX_END_TOKEN_IDS),
            "logprobs": checks.optional_integer("logprobs", logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": checks.optional_integer("prompt_logprobs", prompt_logprobs, 0, MAX_LOGPROBS),
            "grammar": _grammar(grammar),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on which tokens there have been."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token takes the tokens before it: for a penalty, or for the bad sequences."""
        return self.has_penalties or bool(self.bad_token_ids)


def _top_k(value: object) -> int:
    if value == -1 and type(value) is int:
        return 0
    return checks.integer("top_k", value, 0, U32_MAX)


def _min_tokens(value: object, max_tokens: object) -> int:
    """Called after `max_tokens` was checked."""
    checked = checks.integer("min_tokens", value, 0, U32_MAX)
    if isinstance(max_tokens, int) and checked > max_tokens:
        allowed = f"an integer from 0 to max_tokens, which is {max_tokens}"
        raise checks.refusal("min_tokens", value, allowed, "a smaller one, or a larger max_tokens")
    return checked


def _repetition_penalty(value: object) -> float:
    return checks.number("repetition_penalty", value, 0, MAX_REPETITION_PENALTY, "1 for no penalty", above=True)


def _added_penalty(name: str, value: object) -> float:
    return checks.number(name, value, -MAX_ADDED_PENALTY, MAX_ADDED_PENALTY, "0 for no penalty")


def _allowed_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = checks.token_ids("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise checks.refusal("allowed_token_ids", value, "a list of 1 or more", "at least one id, or None for all")
    return ids


def _grammar(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise checks.refusal("grammar", value, "the text of a grammar", "a string, or leave it out")
    return checks.texts("grammar", value, 1, MAX_GRAMMAR_CHARS)[0]
