# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ChatRequest`: the body of POST /v1/chat/completions.

What it leaves out: what is in the messages, which `serve.messages` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from metrale_ray.sampling.checks import U32_MAX
from metrale_ray.sampling.token_params import MAX_LOGPROBS
from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.fields import ListOf, Object
from metrale_ray.serve.openai.inner_fields import MESSAGE, TOOL, TOOL_CHOICE, Known
from metrale_ray.serve.openai.message_schema import MESSAGE_SCHEMA
from metrale_ray.serve.openai.request import parse
from metrale_ray.serve.openai.sampling_fields import SamplingFields
from metrale_ray.serve.openai.structured import Constraint
from metrale_ray.serve.openai.tool_fields import Tool, ToolChoice, check_tools
from metrale_ray.serve.openai.unknown import NOT_ANYWHERE, Unsupported

_NOT_IN_CHAT: dict[str, Unsupported] = {
    "audio": Unsupported((), "Only text is made."),
    "modalities": Unsupported((["text"], []), "Only text is made."),
    "web_search_options": Unsupported((), "Nothing is fetched."),
    "prediction": Unsupported(),
    "verbosity": Unsupported(("medium",), "Say it in a message.", ignored=("low", "high")),
    "moderation": Unsupported(),
    "functions": Unsupported(([],), "It is deprecated: use tools."),
    "function_call": Unsupported(("none", "auto"), "It is deprecated: use tool_choice."),
    "prompt": Unsupported((), "It is for /v1/completions; here give messages."),
    "suffix": Unsupported(("",)),
    "echo": Unsupported((False,), "It is for /v1/completions."),
    "best_of": Unsupported((1,), "It is for /v1/completions; use n."),
    "add_special_tokens": Unsupported((False,), "The chat template writes the special tokens."),
    "include_reasoning": Unsupported((True,), "Reasoning comes in a field of its own, reasoning_content."),
    "thinking_token_budget": Unsupported(),
    "media_io_kwargs": Unsupported(({},), "Only text is served."),
}

Message = Annotated[Object, WithJsonSchema(MESSAGE_SCHEMA)]
"""One message, as the client wrote it."""


class ChatRequest(SamplingFields):
    """A conversation to go on with."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {**NOT_ANYWHERE, **_NOT_IN_CHAT}
    most_items: ClassVar[Mapping[str, str]] = {
        **SamplingFields.most_items,
        "messages": "max_messages",
        "tools": "max_tools",
    }
    parts: ClassVar[Mapping[str, Known]] = {
        **SamplingFields.parts,
        "messages": MESSAGE,
        "tools": TOOL,
        "tool_choice": TOOL_CHOICE,
    }
    most_number: ClassVar[Mapping[str, str]] = {**SamplingFields.most_number, "top_logprobs": "max_logprobs"}

    messages: Annotated[ListOf[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=0, le=U32_MAX, description="The newer name of max_tokens.")
    logprobs: bool = Field(False, description="Tell the log probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And those of so many likeliest ones; needs logprobs."
    )
    tools: ListOf[Tool] | None = None
    tool_choice: ToolChoice | None = Field(None, description="The default is auto where there are tools.")
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The template gets it as a variable."
    )
    documents: ListOf[Object] | None = Field(None, description="The template gets them as a variable.")
    chat_template: str | None = Field(None, description="A template of the request's own, where the service allows it.")
    chat_template_kwargs: Object | None = Field(None, description="More variables for the template.")
    add_generation_prompt: bool | None = Field(None, description="true, unless continue_final_message is.")
    continue_final_message: bool = Field(False, description="Go on with the last message instead of answering it.")

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """The field that limits the answer's tokens, as the client calls it, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def opens_answer(self) -> bool:
        """What the template gets as add_generation_prompt."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def choice_of_tools(self) -> str | Object:
        """tool_choice with its default: "auto" where there are tools, else "none"."""
        if self.tool_choice is None:
            return "auto" if self.tools else "none"
        choice: str | Object = self.tool_choice
        return choice

    @property
    def form(self) -> Constraint | None:
        """What an answer must look like; None where a call is demanded, which has a form of its own."""
        return super().form if self.choice_of_tools in ("none", "auto") else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that the template gets from the request."""
        own = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return {
            **{name: value for name, value in own.items() if value is not None},
            **(self.chat_template_kwargs or {}),
        }

    def check(self, settings: ApiSettings) -> None:
        """What holds for a chat besides."""
        super().check(settings)
        self._check_tokens()
        check_template(self.chat_template, self.chat_template_kwargs, settings)
        check_openings(self.add_generation_prompt, self.continue_final_message)
        check_tools(self.tools or (), self.tool_choice, settings.limits)

    def _check_tokens(self) -> None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise bad_request(
                f"max_completion_tokens is {self.max_completion_tokens}, and max_tokens, its older name, is "
                f"{self.max_tokens}; give one of them",
                param="max_completion_tokens",
            )
        name, most = self.most_tokens
        if most == 0 and self.prompt_logprobs is None:
            raise bad_request(f"{name} is 0; it must be at least 1, unless prompt_logprobs is given", param=name)
        if self.top_logprobs and not self.logprobs:
            raise bad_request(
                f"top_logprobs is {self.top_logprobs} and logprobs is false; set logprobs: true", param="top_logprobs"
            )


def parse_chat(body: object, settings: ApiSettings) -> ChatRequest:
    """The request of a parsed body. Raises ApiError 400."""
    return parse(ChatRequest, body, settings)


def check_template(chat_template: str | None, variables: Object | None, settings: ApiSettings) -> None:
    """Raise ApiError where a request brings a template and may not, or hides one among the variables."""
    if "chat_template" in (variables or {}):
        raise bad_request(
            "chat_template_kwargs holds chat_template, which is no variable of a template; leave it out",
            param="chat_template_kwargs",
        )
    if chat_template is not None and not settings.allow_request_templates:
        raise bad_request(
            "chat_template is not taken from requests by this service; leave it out, and the model's own is used",
            param="chat_template",
        )


def check_openings(add_generation_prompt: bool | None, continue_final_message: bool) -> None:
    """Raise ApiError where the last message is to be gone on with and answered."""
    if add_generation_prompt and continue_final_message:
        raise bad_request(
            "continue_final_message and add_generation_prompt are both true; give one of them",
            param="continue_final_message",
        )
