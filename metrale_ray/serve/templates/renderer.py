# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Renderer`: lays out conversations by the model's chat template, or by one that a request brings.

Rules. Templates run in processes of their own (`cell`), within limits of time, memory and size, and never on the event
loop. There is one process for usual conversations, one for long ones and one for templates from requests, so that what
is slow holds up only its like; each starts when it is first needed. What a template says is wrong becomes a
RequestError with the template's own words.

Leaves out: whether requests may bring templates (whoever calls decides), what normal messages are (`messages`), and
the tokens (`tokens`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from metrale_ray.errors import MetraleError, RequestError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.templates.cell import Cell, CellBusy, CellEnded, CellMissing, CellSlow
from metrale_ray.serve.templates.outcome import MAX_REASON_CHARACTERS, Outcome
from metrale_ray.serve.templates.reserved import check_variables
from metrale_ray.serve.templates.work import framed

BYTES_PER_CHARACTER = 4
"""Of UTF-8, at most."""

CELL_BYTES = 256 * 2**20
CELL_BYTES_PER_CHARACTER = 64
"""Python, jinja2 and a usual template take 30 MB; each character of the limit is there as JSON, text, parts, output."""

LONG_BYTES = 256 * 1024
"""From here on a conversation is laid out apart from the others: it takes several milliseconds."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates that mean something: transformers takes them so."""


class Renderer:
    """Lays out conversations as text. `templates` are the model's by name, none when it has none.

    `special_tokens`: their names (`bos_token`) and texts. Of one event loop; `close` it in the end.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, Any], limits: ServeLimits) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._limits = limits
        memory_bytes = CELL_BYTES + CELL_BYTES_PER_CHARACTER * limits.max_template_characters
        self._usual, self._long, self._foreign = Cell(memory_bytes), Cell(memory_bytes), Cell(memory_bytes)

    @property
    def has_template(self) -> bool:
        """Whether the model has one of its own."""
        return bool(self._templates)

    async def start(self) -> None:
        """Start the process of usual conversations, so that the first one need not wait. Raises MetraleError."""
        try:
            await self._usual.start()
        except (CellBusy, CellMissing) as error:
            raise _no_process(error) from error

    def close(self) -> None:
        """End its processes, now. Whoever waits gets an error. Idempotent."""
        for cell in (self._usual, self._long, self._foreign):
            cell.close()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of `messages`, which are normal ones.

        `template`: instead of the model's own; the name of one of the model's is allowed. `variables`: what the request
        gives besides, `documents` among it. Raises RequestError: for what is too large or takes too long
        (code "template_limit"), for a model without a template (code "no_chat_template"), for reserved variables, and
        with the template's own words when it refuses; "too_many_requests" when others take too long before it. Raises
        MetraleError when no process can be started.
        """
        variables = variables or {}
        check_variables(variables, self._special_tokens)
        if continue_final_message:
            _check_continues(messages, add_generation_prompt=add_generation_prompt)
        text = self._text_of(template, has_tools=tools is not None)
        is_foreign = template is not None and template not in self._templates
        mark = f"\ue000{secrets.token_hex(16)}" if continue_final_message else None
        given = {
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        frame = framed(text, given, self._limits.max_template_characters, mark)
        outcome, content = await self._work(frame, is_foreign=is_foreign)
        if outcome is Outcome.TEXT:
            return content
        raise _refusal(outcome, content, is_foreign=is_foreign)

    def _text_of(self, template: str | None, *, has_tools: bool) -> str:
        if template is not None:
            return self._checked(self._templates.get(template, template))
        names = (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        if found is not None:
            return found
        if self._templates:
            raise RequestError(
                f"this model has several chat templates and none of them is the default: name one as chat_template, of "
                f"{sorted(self._templates)}",
                code="no_chat_template",
                param="chat_template",
            )
        raise RequestError(
            "this model has no chat template, so it takes no messages. Start the service with --chat-template FILE to "
            "give it one, or send a prompt to /v1/completions",
            code="no_chat_template",
            param="messages",
        )

    def _checked(self, template: str) -> str:
        if len(template) > self._limits.max_template_characters:
            raise RequestError(
                f"chat_template has {len(template)} characters; at most {self._limits.max_template_characters} are "
                "allowed. Shorten it.",
                code="template_limit",
                param="chat_template",
            )
        return template

    async def _work(self, frame: bytes, *, is_foreign: bool) -> tuple[Outcome, str]:
        cell = self._foreign if is_foreign else self._long if len(frame) > LONG_BYTES else self._usual
        param = "chat_template" if is_foreign else "messages"
        most_characters = self._limits.max_template_characters + MAX_REASON_CHARACTERS
        timeout_s = self._limits.template_timeout_s
        try:
            outcome, content = await cell.work(frame, timeout_s, BYTES_PER_CHARACTER * most_characters)
            return outcome, content.decode()
        except CellBusy as error:
            raise RequestError(
                f"the messages cannot be laid out: {error}, as others took too long before it. Try again.",
                code="too_many_requests",
                param=param,
            ) from error
        except CellSlow as error:
            raise RequestError(
                f"the chat template takes too long: at most {timeout_s:g} s are allowed. Send less, or change the "
                "template.",
                code="template_limit",
                param=param,
            ) from error
        except (CellEnded, UnicodeDecodeError) as error:
            raise RequestError(
                f"the chat template was ended: {error}. Send less, or change the template.",
                code="template_limit",
                param=param,
            ) from error
        except CellMissing as error:
            raise _no_process(error) from error


def _check_continues(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> None:
    param = "continue_final_message"
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude one another: set the latter to false", param=param
        )
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise RequestError(
            "continue_final_message needs a last message with content, which the answer then continues", param=param
        )


def _refusal(outcome: Outcome, reason: str, *, is_foreign: bool) -> RequestError:
    param = "chat_template" if is_foreign else "messages"
    match outcome:
        case Outcome.REFUSED:
            return RequestError(f"the chat template refuses these messages: {reason}", param="messages")
        case Outcome.UNREADABLE:
            return RequestError(f"the chat template is no valid template: {reason}", param="chat_template")
        case Outcome.TOO_LONG | Outcome.NO_MEMORY:
            return RequestError(
                f"the chat template makes too much of these messages: {reason}. Send less, or change the template.",
                code="template_limit",
                param=param,
            )
        case _:
            return RequestError(f"the chat template fails on these messages: {reason}", param=param)


def _no_process(error: Exception) -> MetraleError:
    return MetraleError(f"the process that lays out messages cannot be used: {error}")
