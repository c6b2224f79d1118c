# SPDX-License-Identifier: MIT OR Apache-2.0
"""`normal_messages`: from the messages of a chat request to the ones that a chat template is given.

`normal_messages_apart` is the same, off the event loop where it takes long.

Rules. A template sees the same shape however a client wrote it: content is always a text, arguments of calls are
objects, the role is one of system, user, assistant and tool, and a key without a value is left out. What cannot be
given to a template is refused with its place; nothing is dropped that the model should have seen. Keys that no
template reads are dropped.

Leaves out: images, audio and files, which no model here takes.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

from metrale_ray.errors import RequestError
from metrale_ray.serve.json_bounds import excess

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What a client may write, and what a template is given: those who know `developer` at all treat it as `system`."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Under which clients send back what a model thought, the first that is there; a template reads the first or last."""

MAX_CALLS = 128
MAX_PARTS = 4096
MAX_NAME_CHARACTERS = 256

LONG_MESSAGES = 256
LONG_CHARACTERS = 16 * 1024
"""Of lists of parts or of arguments of calls. Below both it is done in about a millisecond."""

Message = dict[str, Any]


async def normal_messages_apart(messages: Sequence[Any], max_messages: int) -> list[Message]:
    """`normal_messages`, in a thread where it takes long. Raises RequestError."""
    if _are_short(messages):
        return normal_messages(messages, max_messages)
    return await asyncio.to_thread(normal_messages, messages, max_messages)


def normal_messages(messages: object, max_messages: int) -> list[Message]:
    """`messages` of a request's JSON, as a template is given them. Raises RequestError, whose param is the place."""
    if not _is_list(messages):
        _refuse("messages", messages, "a list of messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    if len(messages) > max_messages:
        raise RequestError(
            f"messages has {len(messages)} entries; at most {max_messages} are allowed. Shorten the conversation.",
            param="messages",
        )
    _check_arguments(messages)
    known_ids: set[str] = set()
    return [_message(f"messages[{index}]", message, known_ids) for index, message in enumerate(messages)]


def _check_arguments(messages: Sequence[Any]) -> None:
    """All arguments together are one more body to be parsed. One that is no JSON hides only what is behind it."""
    too_much = excess(",".join(_texts_of_arguments(messages)).encode("utf-8", "replace"))
    if too_much is not None:
        raise RequestError(
            f"the arguments of all calls together are JSON that {too_much}. Shorten the conversation.", param="messages"
        )


def _texts_of_arguments(messages: Sequence[Any]) -> Iterator[str]:
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if _is_list(calls) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def _are_short(messages: Sequence[Any]) -> bool:
    """Whether hardly anything is to be done: few messages, few parts, few calls with short arguments."""
    if len(messages) > LONG_MESSAGES:
        return False
    given = [message for message in messages if isinstance(message, dict)]
    lists = [found for message in given for found in (message.get("content"), message.get("tool_calls"))]
    if sum(len(found) for found in lists if _is_list(found)) > LONG_MESSAGES:
        return False
    return sum(map(len, _texts_of_arguments(messages))) <= LONG_CHARACTERS


def _message(place: str, given: object, known_ids: set[str]) -> Message:
    if not isinstance(given, dict):
        _refuse(place, given, "an object with role and content")
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{place}.role", role, f"one of {', '.join(ROLES)}")
    message: Message = {"role": ROLES[role], "content": _content(place, given, role)}
    if given.get("name") is not None:
        message["name"] = _name(f"{place}.name", given["name"])
    if (more := _MORE.get(role)) is not None:
        message |= more(place, given, known_ids)
    return message


def _content(place: str, given: Mapping[str, Any], role: str) -> str:
    content = given.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return _refusal(place, given)
    if not _is_list(content):
        _refuse(f"{place}.content", content, "a text, or a list of parts of type 'text'")
    if len(content) > MAX_PARTS:
        raise RequestError(
            f"{place}.content has {len(content)} parts; at most {MAX_PARTS} are allowed. Join some.",
            param=f"{place}.content",
        )
    return "".join(_part(f"{place}.content[{index}]", part, role) for index, part in enumerate(content))


def _refusal(place: str, given: Mapping[str, Any]) -> str:
    """An answer without content is one of calls or of reasoning alone, or a refusal, which is a text too."""
    refusal = given.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        _refuse(f"{place}.refusal", refusal, "a text, or null")
    return refusal or ""


def _part(place: str, part: object, role: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        _refuse(place, part, "an object with type 'text' and a text")
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    kind = part.get("type")
    if kind not in kinds:
        _refuse(f"{place}.type", kind, " or ".join(map(repr, kinds)), "Only text is supported: leave this part out.")
    text = part.get(str(kind))
    if not isinstance(text, str):
        _refuse(f"{place}.{kind}", text, "a text")
    return text


def _of_assistant(place: str, given: Mapping[str, Any], known_ids: set[str]) -> Message:
    for name, instead in (("function_call", "use tool_calls"), ("audio", "leave it out")):
        if given.get(name) is not None:
            raise RequestError(f"{place}.{name} is not supported; {instead}", param=f"{place}.{name}")
    message = _reasoning(place, given)
    calls = given.get("tool_calls")
    if calls is None:
        return message
    if not _is_list(calls):
        _refuse(f"{place}.tool_calls", calls, "a list of calls")
    if len(calls) > MAX_CALLS:
        raise RequestError(
            f"{place}.tool_calls has {len(calls)} entries; at most {MAX_CALLS} are allowed. Leave some out.",
            param=f"{place}.tool_calls",
        )
    found = [_call(f"{place}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    known_ids.update(call["id"] for call in found)
    # An empty list is what some clients send for none; templates ask only whether the key is there.
    return message | {"tool_calls": found} if found else message


def _reasoning(place: str, given: Mapping[str, Any]) -> Message:
    name = next((name for name in REASONING_KEYS if given.get(name) is not None), None)
    if name is None:
        return {}
    if not isinstance(given[name], str):
        _refuse(f"{place}.{name}", given[name], "a text")
    return {"reasoning_content": given[name], "thinking": given[name]}


def _call(place: str, given: object) -> Message:
    if not isinstance(given, dict):
        _refuse(place, given, "an object with id, type and function")
    if given.get("type", "function") != "function":
        _refuse(f"{place}.type", given["type"], "'function'")
    function = given.get("function")
    if not isinstance(function, dict):
        _refuse(f"{place}.function", function, "an object with name and arguments")
    arguments = _arguments(f"{place}.function.arguments", function.get("arguments"))
    name = _name(f"{place}.function.name", function.get("name"))
    call_id = _name(f"{place}.id", given.get("id"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(place: str, given: object) -> Mapping[str, Any]:
    """As an object. A call without arguments has an empty text in some clients, and none in others."""
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        _refuse(place, given, "a text that is a JSON object")
    try:
        value = json.loads(given, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place} is no JSON: {error}; give a text that is a JSON object", param=place) from error
    if not isinstance(value, dict):
        _refuse(place, value, "a text that is a JSON object")
    return value


def _of_tool(place: str, given: Mapping[str, Any], known_ids: set[str]) -> Message:
    call_id = given.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        _refuse(f"{place}.tool_call_id", call_id, "the id of the call that this message answers")
    if call_id not in known_ids:
        _refuse(f"{place}.tool_call_id", call_id, "the id of a call in tool_calls of an assistant's message before it")
    return {"tool_call_id": call_id}


_MORE: dict[str, Callable[[str, Mapping[str, Any], set[str]], Message]] = {
    "assistant": _of_assistant,
    "tool": _of_tool,
}


def _name(place: str, given: object) -> str:
    if not isinstance(given, str) or not 1 <= len(given) <= MAX_NAME_CHARACTERS:
        _refuse(place, given, f"a text of 1 to {MAX_NAME_CHARACTERS} characters")
    return given


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, list | tuple)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _refuse(place: str, given: object, allowed: str, change: str = "") -> NoReturn:
    shown = "missing or null" if given is None else _shown(given)
    raise RequestError(f"{place} is {shown}; it must be {allowed}. {change}".rstrip(), param=place)


def _shown(given: object) -> str:
    """In a few words, however large it is."""
    try:
        return reprlib.repr(given)
    except ValueError:  # an integer of thousands of digits is somewhere in it
        return f"of type {type(given).__name__}"
