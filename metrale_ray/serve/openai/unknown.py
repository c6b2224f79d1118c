# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fields that are not used: known ones that are not supported yet, and those that nobody knows.

Rules. A field that we know and do not support is refused by name, unless its value asks for nothing, or for something
that changes nothing of what is right. A field that nobody knows is ignored and listed, or refused where the service is
strict, at whatever depth (`inner_fields`). Names come from clients, so what is listed
is short and plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.openai.mistakes import shorter

MAX_LISTED = 32
MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field. `neutral`: values that ask for nothing, besides null. `instead`: what to do.

    `ignored`: values that ask for something which an answer is right without; they are taken, and listed.
    """

    neutral: tuple[Any, ...] = ()
    instead: str = "Leave it out."
    ignored: tuple[Any, ...] = ()


NOT_ANYWHERE: dict[str, Unsupported] = {
    "store": Unsupported((False,), "Nothing is stored: leave it out."),
    "service_tier": Unsupported(("auto", "default"), "There is one tier: leave it out, or give 'auto'."),
    "use_beam_search": Unsupported((False,), "Beam search is not done; use n or best_of."),
    "length_penalty": Unsupported((1,), "It is for beam search, which is not done."),
    "early_stopping": Unsupported((False,), "It is for beam search, which is not done."),
    "truncate_prompt_tokens": Unsupported((), "Shorten the prompt."),
    "spaces_between_special_tokens": Unsupported((True,)),
    "return_tokens_as_token_ids": Unsupported((False,), "Use return_token_ids."),
    "logits_processors": Unsupported(([],), "Use logit_bias, allowed_token_ids or structured_outputs."),
    "prompt_embeds": Unsupported((), "Send text or token ids."),
    "mm_processor_kwargs": Unsupported(({},), "Only text is served."),
    "kv_transfer_params": Unsupported(({},)),
    "vllm_xargs": Unsupported(({},)),
    "guided_decoding_backend": Unsupported(("auto",), "There is one backend: leave it out."),
    "guided_whitespace_pattern": Unsupported(),
    "regex": Unsupported((), 'Use structured_outputs: {"regex": ...}.'),
    "ebnf": Unsupported((), 'Use structured_outputs: {"grammar": ...}.'),
    "grammar": Unsupported(("",), 'Use structured_outputs: {"grammar": ...}.'),
    "json_schema": Unsupported((), "Use response_format of type json_schema."),
    "typical_p": Unsupported((1,), "Use top_p or min_p."),
    "mirostat": Unsupported((0,), "Use top_p or min_p."),
    "xtc_probability": Unsupported((0,)),
    "dry_multiplier": Unsupported((0,), "Use repetition_penalty or frequency_penalty."),
    "n_probs": Unsupported((0,), "Use logprobs."),
    "n_predict": Unsupported((), "Use max_tokens."),
    "stream_options.include_obfuscation": Unsupported((False,), ignored=(True,)),
    "structured_outputs.structural_tag": Unsupported((), "Use json, regex, choice or grammar."),
    "structured_outputs.whitespace_pattern": Unsupported(),
    "structured_outputs.disable_any_whitespace": Unsupported((False,)),
    "structured_outputs.disable_additional_properties": Unsupported((False,)),
}
"""Fields of OpenAI's, vLLM's and others' interfaces that no route takes yet."""


def refuse_unsupported(body: Mapping[str, Any], table: Mapping[str, Unsupported]) -> None:
    """Raise ApiError naming the first field of `body` that is known, not supported, and asks for something."""
    for name, field in table.items():
        value = _at(body, name)
        if value is not None and not any(_same(value, taken) for taken in (*field.neutral, *field.ignored)):
            raise bad_request(f"{name} is not supported. {field.instead}", param=name, code="unsupported_field")


def ignored_names(body: Mapping[str, Any], table: Mapping[str, Unsupported]) -> list[str]:
    """The names of known fields in `body` whose values are taken and have no effect."""
    return [
        name
        for name, field in table.items()
        if field.ignored and any(_same(_at(body, name), ignored) for ignored in field.ignored)
    ]


def listed(names: Sequence[str]) -> str:
    """`names` as one short line of printable ASCII, fit for a header."""
    plain = [shorter(name.encode("ascii", "replace").decode(), MAX_NAME_CHARACTERS) for name in names[:MAX_LISTED]]
    more = [f"and {len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return ", ".join(name.replace(",", "?") for name in plain + more)


def _at(body: Mapping[str, Any], name: str) -> Any:
    top, _, inner = name.partition(".")
    value = body.get(top)
    if not inner:
        return value
    return value.get(inner) if isinstance(value, dict) else None


def _same(value: object, neutral: object) -> bool:
    """Equal, where a bool is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
