# SPDX-License-Identifier: MIT OR Apache-2.0
"""POST /v1/chat/completions, without HTTP: from a request to an answer that is whole, or to the events of a stream.

Rules: everything is checked and prepared before anything is sent to the engine. A template gets no tools where
tool_choice is "none". Tools that the model may use as it likes need a parser that reads its calls; a call that is
demanded is made in a form that is read anyway. A constraint begins behind the reasoning, where the prompt opens one or
the answer begins with one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from metrale_ray.errors import EngineDead, MetraleError, RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.failures import of_error
from metrale_ray.serve.messages import normal_messages_apart
from metrale_ray.serve.openai.call import Call
from metrale_ray.serve.openai.chat_answer import ChatWork, whole_chat
from metrale_ray.serve.openai.chat_choice import ChatShape, long_call_id, short_call_id
from metrale_ray.serve.openai.chat_chunks import ChatChunks
from metrale_ray.serve.openai.chat_request import ChatRequest
from metrale_ray.serve.openai.generation import Generation
from metrale_ray.serve.openai.parameters import chat_params, told_to
from metrale_ray.serve.openai.preparing import prepared
from metrale_ray.serve.openai.stream import streamed
from metrale_ray.serve.openai.tool_fields import Tool, chosen_function
from metrale_ray.serve.parsing.choose import form_of, make_parser, needs_special_tokens, reasoning_at, reasoning_marks
from metrale_ray.serve.parsing.forms import special_ids
from metrale_ray.serve.parsing.pieces import OutputParser
from metrale_ray.serve.parsing.tool_grammar import tool_grammar
from metrale_ray.serve.templates.tokens import chat_token_ids

_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class StartedChat:
    """A chat that is checked and prepared. It is asked once, for one of the two."""

    work: ChatWork

    async def whole(self) -> dict[str, Any]:
        """OpenAI's object. Raises ApiError. Cancelling it aborts the work."""
        return await whole_chat(self.work)

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises ApiError before the first. Closing it aborts the work."""
        return streamed(self.work.generation, ChatChunks(self.work))


async def start_chat(call: Call, request: ChatRequest) -> StartedChat:
    """Check and prepare one call. Raises ApiError."""
    try:
        return StartedChat(await _work(call, request))
    except RequestError as error:
        raise told_to(request, error) from error
    except EngineDead as error:
        raise of_error(await call.model.backend.explain(error)) from error
    except MetraleError as error:
        raise of_error(error) from error


async def _work(call: Call, request: ChatRequest) -> ChatWork:
    front, model = call.model.backend.front(), call.model
    _check_tools(call, request)
    text = await _laid_out(call, request)
    place = reasoning_at(text, model.reasoning_parser, opens_answer=request.opens_answer)
    params = _params(call, request, *reasoning_marks(place))
    token_ids = await _token_ids(call, text)
    with _told_of_tools(request):
        requests = await prepared(call, front, [token_ids], params, request.priority)

    def new_parser() -> OutputParser:
        return make_parser(
            model.tool_parser, model.reasoning_parser, _tools(request), request.choice_of_tools, place == "open"
        )

    return ChatWork(
        Generation(call, front, requests, "tools" if request.form is None else request.form.param),
        _shape(call, request),
        new_parser,
        model.tokenizer,
        {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": call.model_name,
            "system_fingerprint": None,
        },
        request.prompt_logprobs,
        request.include_usage,
        request.continuous_usage_stats,
    )


@contextmanager
def _told_of_tools(request: ChatRequest) -> Iterator[None]:
    """A form that the request does not give itself comes from its tools: what is wrong with it is told of them."""
    try:
        yield
    except RequestError as error:
        if error.param != "structured_outputs" or request.form is not None:
            raise
        raise RequestError(f"the schemas of the tools: {error.message}", code=error.code, param="tools") from error


def _tools(request: ChatRequest) -> list[Tool]:
    """The tools that the model may call."""
    return [] if request.choice_of_tools == "none" else list(request.tools or ())


def _check_tools(call: Call, request: ChatRequest) -> None:
    if _tools(request) and form_of(call.model.tool_parser, request.choice_of_tools) is None:
        raise RequestError(
            "tools are given and tool_choice is 'auto', and this service does not know how the model writes its calls. "
            "Start it with --tool-parser, or set tool_choice to 'required', to one function, or to 'none'",
            code="no_tool_parser",
            param="tools",
        )


async def _laid_out(call: Call, request: ChatRequest) -> str:
    """The conversation as text."""
    messages = await normal_messages_apart(request.messages, call.settings.limits.max_messages)
    if call.model.template is None or call.model.tokenizer is None:
        raise RequestError(
            "this model has no tokenizer, so it takes no messages; send token ids to /v1/completions",
            code="no_chat_template",
            param="messages",
        )
    return await call.model.template.render(
        messages,
        template=request.chat_template,
        tools=_tools(request) or None,
        variables=request.template_variables,
        add_generation_prompt=request.opens_answer,
        continue_final_message=request.continue_final_message,
    )


async def _token_ids(call: Call, text: str) -> list[int]:
    assert call.model.tokenizer is not None  # seen when the text was laid out
    return await chat_token_ids(call.model.tokenizer, text, call.model.max_model_len)


def _params(call: Call, request: ChatRequest, after: str | None, opening: str | None) -> SamplingParams:
    """The parameters, with the form that tools and the request's own form demand together."""
    model = call.model
    form = form_of(model.tool_parser, request.choice_of_tools) if _tools(request) else None
    grammar = _tool_grammar(call, request, special_ids(form, model.tokenizer))
    return chat_params(
        request,
        model,
        tool_outputs=None if grammar is None else StructuredOutputs(grammar=grammar, after=after, opening=opening),
        after=after,
        opening=opening,
        keep_special_tokens=needs_special_tokens(form, model.reasoning_parser, model.tokenizer),
    )


def _tool_grammar(call: Call, request: ChatRequest, ids: Mapping[str, int]) -> str | None:
    """The grammar that tools need; None: the request's own form holds, if it has one.

    Where the answer has a schema, it may be calls instead. Any other form of its own leaves no room for calls.
    """
    own = request.form
    shape = None if own is None else own.outputs()
    schema = None if shape is None else _ANY_OBJECT if shape.json_object else shape.json
    if shape is not None and schema is None:
        return None
    return tool_grammar(
        _tools(request), request.choice_of_tools, call.model.tool_parser, request.parallel_tool_calls, ids, schema
    )


def _shape(call: Call, request: ChatRequest) -> ChatShape:
    _, most = request.most_tokens
    return ChatShape(
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        has_reasoning=call.model.reasoning_parser is not None,
        is_named=chosen_function(request.tool_choice) is not None,
        has_answer=most != 0,
        has_token_ids=request.return_token_ids,
        call_id=short_call_id if call.model.tool_parser == "mistral" else long_call_id,
    )
