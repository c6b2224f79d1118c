# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SamplingParams`: `TokenParams` and what a request says in texts, which stays in the front.

Rules: as of `TokenParams`: vLLM's names and defaults, every value checked when the object is made, every list with a
limit. `for_tokens` gives the part that is sent to the head.

What it leaves out: turning texts into tokens, which needs the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack

from metrale_ray.errors import RequestError
from metrale_ray.sampling import checks
from metrale_ray.sampling.checks import U32_MAX as U32_MAX
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.sampling.structured import structured_outputs as as_structured_outputs
from metrale_ray.sampling.token_params import TokenFields, TokenParams

MAX_STOP_STRINGS = 16
"""Each is searched for at each token; the front does this on one core for all of its requests."""

MAX_STOP_CHARACTERS = 256
"""Characters of one stop string: so much text is held back while it may still become one."""

MAX_BAD_WORDS = 1000
"""Each is tokenized twice when the request comes, and looked for at each token."""

MAX_BAD_WORD_CHARACTERS = 256
"""Characters of one bad word."""


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams(TokenParams):
    """How tokens are chosen, and when the text ends. Every field may be given as a keyword; all have defaults.

    The fields of `TokenParams`, and:

    stop: texts that end the output, 16 of up to 256 characters each; a single str is taken as one.
    include_stop_str_in_output: leave the stop text at the end of the output.
    skip_special_tokens: leave special tokens, such as the end of the sequence, out of the text.
    bad_words: texts that must not occur in the output, 1000 of up to 256 characters each.
    structured_outputs: the shape that the text must have (`StructuredOutputs`, or a mapping of its fields); not
        together with `grammar`.

    Raises RequestError, with `param` naming the field.
    """

    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    bad_words: tuple[str, ...]
    structured_outputs: StructuredOutputs | None

    def __init__(
        self,
        *,
        stop: str | Sequence[str] | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        bad_words: Sequence[str] | None = None,
        structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None,
        **token_fields: Unpack[TokenFields],
    ) -> None:
        TokenParams.__init__(self, **token_fields)
        values = {
            "stop": checks.texts("stop", stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
            "include_stop_str_in_output": checks.flag("include_stop_str_in_output", include_stop_str_in_output),
            "skip_special_tokens": checks.flag("skip_special_tokens", skip_special_tokens),
            "bad_words": checks.texts("bad_words", bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
            "structured_outputs": as_structured_outputs(structured_outputs),
        }
        if self.grammar is not None and values["structured_outputs"] is not None:
            raise RequestError(
                "grammar and structured_outputs are both given; give one of them", param="structured_outputs"
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def for_tokens(
        self,
        bad_token_ids: Sequence[Sequence[int]] = (),
        end_token_ids: Sequence[int] = (),
        grammar: str | None = None,
    ) -> TokenParams:
        """What the head is sent: the token fields, with the bad words and the tokenizer's ends as tokens added, and
        what `structured_outputs` is as a `grammar`.

        `bad_token_ids` and `end_token_ids` come after those that these parameters already name. Raises RequestError
        when there are then too many.
        """
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(TokenParams)}
        values["bad_token_ids"] = (*self.bad_token_ids, *bad_token_ids)
        values["end_token_ids"] = (*self.end_token_ids, *end_token_ids)
        values["grammar"] = self.grammar if grammar is None else grammar
        return TokenParams(**values)
