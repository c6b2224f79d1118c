# SPDX-License-Identifier: MIT OR Apache-2.0
"""`TokenizeRequest` and `DetokenizeRequest`: the bodies of POST /tokenize and POST /detokenize, as vLLM has them.

Rules: a text to tokenize is a `prompt`, or `messages` that the chat template lays out: exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.chat_request import Message, check_openings, check_template
from metrale_ray.serve.openai.fields import ListOf, Object, TokenId, nullable
from metrale_ray.serve.openai.inner_fields import MESSAGE, TOOL, Known
from metrale_ray.serve.openai.request import Request, parse
from metrale_ray.serve.openai.tool_fields import Tool, check_tools

MAX_TOKENS = 2**19
"""Token ids of one detokenize. Decoding holds up all threads, for less than 0.1 s then."""


def _one_text(schema: dict[str, Any]) -> None:
    """That one of the two must be there. That only one may be is left to `check`: a schema says it clumsily."""
    nullable(schema)
    schema["anyOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]


class TokenizeRequest(Request):
    """A text, or a conversation, whose token ids are asked for."""

    model_config = ConfigDict(json_schema_extra=_one_text)

    most_items: ClassVar[Mapping[str, str]] = {"messages": "max_messages", "tools": "max_tools"}
    parts: ClassVar[Mapping[str, Known]] = {"messages": MESSAGE, "tools": TOOL}

    model: str | None = Field(None, description="The model's name. May be left out where one model is served.")
    prompt: str | None = Field(None, description="The text.")
    messages: Annotated[ListOf[Message], Field(min_length=1)] | None = Field(None, description="Or the conversation.")
    add_special_tokens: bool | None = Field(None, description="true for a prompt; false, and only that, for messages.")
    return_token_strs: bool = Field(False, description="Tell the text of each token too.")
    tools: ListOf[Tool] | None = None
    chat_template: str | None = Field(None, description="A template of the request's own, where the service allows it.")
    chat_template_kwargs: Object | None = Field(None, description="More variables for the template.")
    add_generation_prompt: bool | None = Field(None, description="true, unless continue_final_message is.")
    continue_final_message: bool = False

    @property
    def opens_answer(self) -> bool:
        """What the template gets as add_generation_prompt."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the template gets from the request."""
        return dict(self.chat_template_kwargs or {})

    def check(self, settings: ApiSettings) -> None:
        """Exactly one thing to tokenize, and what holds for a chat's template."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give exactly one of prompt and messages", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise bad_request(
                "add_special_tokens is true; the chat template writes the special tokens, so leave it out",
                param="add_special_tokens",
            )
        check_template(self.chat_template, self.chat_template_kwargs, settings)
        check_openings(self.add_generation_prompt, self.continue_final_message)
        check_tools(self.tools or (), None, settings.limits)


class DetokenizeRequest(Request):
    """Token ids whose text is asked for."""

    model: str | None = Field(None, description="The model's name. May be left out where one model is served.")
    tokens: Annotated[ListOf[TokenId], Field(max_length=MAX_TOKENS)] = Field(description="The token ids.")


def parse_tokenize(body: object, settings: ApiSettings) -> TokenizeRequest:
    """The request of a parsed body. Raises ApiError 400."""
    return parse(TokenizeRequest, body, settings)


def parse_detokenize(body: object, settings: ApiSettings) -> DetokenizeRequest:
    """The request of a parsed body. Raises ApiError 400."""
    return parse(DetokenizeRequest, body, settings)
