# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversations are laid out as transformers lays them out, and a template can do no harm and take no long time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from metrale_ray.errors import MetraleError, RequestError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.messages import normal_messages
from metrale_ray.serve.templates.renderer import LONG_BYTES, Renderer
from metrale_ray.serve.templates.reserved import MAX_VARIABLES, RESERVED
from metrale_ray.serve.templates.tokens import chat_token_ids
from metrale_ray.serve.text import Tokenizer
from tests.serve.templates.texts import CALLS, HELLO, LLAMA, MISTRAL, QWEN, SMOL, TEMPLATES, TOOL, TURNS

LIMITS = ServeLimits(template_timeout_s=60, max_template_characters=2**20)
SHORT = ServeLimits(template_timeout_s=0.3, max_template_characters=2**20)
PLAIN = "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ ';' }}{% endfor %}"
ENDLESS = "{% for i in range(25000) %}{% for j in range(25000) %}{% endfor %}{% endfor %}"
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>", "<|header|>", "<|/header|>"]


def tokenizer_of(*, adds_bos: bool) -> Tokenizer:
    """Byte by byte, with a beginning that it adds to what it encodes, or not."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rust = RustTokenizer(models.BPE(letters, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(SPECIAL)
    if adds_bos:
        bos = rust.token_to_id("<s>")
        rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    inner = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    return Tokenizer(inner, [inner.eos_token_id])


TOKENIZER = tokenizer_of(adds_bos=True)
SPECIAL_TOKENS: dict[str, str] = TOKENIZER.inner.special_tokens_map


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer({"default": PLAIN, "tool_use": "tools: {{ tools|length }}"}, SPECIAL_TOKENS, LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def short() -> Iterator[Renderer]:
    made = Renderer({"default": PLAIN}, SPECIAL_TOKENS, SHORT)
    yield made
    made.close()


def refused(runner: asyncio.Runner, work: Coroutine[Any, Any, str]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        runner.run(work)
    return caught.value


def theirs(messages: Sequence[Mapping[str, Any]], template: str, **more: Any) -> list[int]:
    ids: list[int] = TOKENIZER.inner.apply_chat_template(
        [dict(one) for one in messages], chat_template=template, tokenize=True, return_dict=False, **more
    )
    return ids


async def ours(renderer: Renderer, messages: object, template: str, **more: Any) -> list[int]:
    text = await renderer.render(normal_messages(messages, 100), template=template, **more)
    return await chat_token_ids(TOKENIZER, text, 2**17)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
@pytest.mark.parametrize("messages", [HELLO, TURNS])
def test_the_ids_are_those_of_transformers(
    runner: asyncio.Runner, renderer: Renderer, name: str, prompt: bool, tools: Any, messages: Any
) -> None:
    given = {"tools": tools, "add_generation_prompt": prompt}
    expected = theirs(messages, TEMPLATES[name], **given)
    assert runner.run(ours(renderer, messages, TEMPLATES[name], **given)) == expected


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_calls_and_their_answers_are_those_of_transformers(
    runner: asyncio.Runner, renderer: Renderer, template: str
) -> None:
    parsed = json.loads(json.dumps(CALLS))
    parsed[1]["tool_calls"][0]["function"]["arguments"] = json.loads(CALLS[1]["tool_calls"][0]["function"]["arguments"])
    given = {"tools": [TOOL], "add_generation_prompt": True}
    assert runner.run(ours(renderer, CALLS, template, **given)) == theirs(parsed, template, **given)


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (QWEN, {"enable_thinking": False}),
        (LLAMA, {"date_string": "1 Jan 2030"}),
        (TEMPLATES["training"], {"documents": [{"title": "t", "text": "x"}]}),
    ],
)
def test_variables_of_a_request_reach_the_template(
    runner: asyncio.Runner, renderer: Renderer, template: str, variables: dict[str, Any]
) -> None:
    found = runner.run(ours(renderer, HELLO, template, variables=variables))
    assert found == theirs(HELLO, template, add_generation_prompt=True, **variables)
    assert found != theirs(HELLO, template, add_generation_prompt=True)


@pytest.mark.parametrize("content", ["The answer", "The answer ", " so\n\n", "a</think>b"])
@pytest.mark.parametrize("name", ["smol", "qwen", "llama", "mistral"])
def test_a_last_message_is_continued_as_transformers_does(
    runner: asyncio.Runner, renderer: Renderer, name: str, content: str
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    found = runner.run(
        ours(renderer, messages, TEMPLATES[name], continue_final_message=True, add_generation_prompt=False)
    )
    assert found == theirs(messages, TEMPLATES[name], continue_final_message=True)
    assert TOKENIZER.decode(found).endswith(content.strip() if name in ("llama", "mistral") else content)


def test_a_message_that_the_template_hides_cannot_be_continued(runner: asyncio.Runner, renderer: Renderer) -> None:
    error = refused(
        runner, renderer.render(HELLO, template="x", continue_final_message=True, add_generation_prompt=False)
    )
    assert "does not show the content of the last message" in error.message


@pytest.mark.parametrize(
    ("messages", "prompt", "message"),
    [(HELLO, True, "exclude one another"), ([{"role": "assistant"}], False, "needs a last message with content")],
)
def test_what_cannot_be_continued_is_refused(
    runner: asyncio.Runner, renderer: Renderer, messages: Any, prompt: bool, message: str
) -> None:
    error = refused(runner, renderer.render(messages, continue_final_message=True, add_generation_prompt=prompt))
    assert message in error.message
    assert error.param == "continue_final_message"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_there_is_one_beginning_whoever_would_add_it(
    runner: asyncio.Runner, renderer: Renderer, adds_bos: bool
) -> None:
    tokenizer = tokenizer_of(adds_bos=adds_bos)
    bos = tokenizer.inner.bos_token_id
    text = runner.run(renderer.render(HELLO, template=LLAMA))
    assert runner.run(chat_token_ids(tokenizer, text, 2**17)).count(bos) == 1
    # A template without one stays without one, as in transformers.
    text = runner.run(renderer.render(HELLO, template=SMOL))
    assert runner.run(chat_token_ids(tokenizer, text, 2**17)).count(bos) == 0


def test_parts_are_laid_out_as_their_text(runner: asyncio.Runner, renderer: Renderer) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    as_parts = [{"role": "developer", "content": []}, {"role": "user", "content": parts}]
    as_text = [{"role": "system", "content": ""}, *HELLO]
    for template in (SMOL, QWEN, LLAMA, MISTRAL):
        assert runner.run(ours(renderer, as_parts, template)) == theirs(as_text, template, add_generation_prompt=True)


def test_the_templates_own_words_are_told(runner: asyncio.Runner, renderer: Renderer) -> None:
    messages = [*HELLO, *HELLO]
    error = refused(runner, renderer.render(messages, template=MISTRAL))
    assert error.message == (
        "the chat template refuses these messages: After the optional system message, roles must alternate "
        "user/assistant/..."
    )
    assert (error.code, error.param) == ("invalid_request", "messages")


def test_the_models_own_templates_are_chosen_by_tools_and_by_name(runner: asyncio.Runner, renderer: Renderer) -> None:
    assert runner.run(renderer.render(HELLO)) == "user:Hello there;"
    assert runner.run(renderer.render(HELLO, tools=[TOOL])) == "tools: 1"
    assert runner.run(renderer.render(HELLO, tools=[TOOL], template="default")) == "user:Hello there;"
    assert renderer.has_template


@pytest.mark.parametrize(
    ("templates", "message"),
    [({}, "--chat-template FILE.*/v1/completions"), ({"rag": "x", "other": "y"}, r"\['other', 'rag'\]")],
)
def test_a_model_without_a_template_says_what_to_do(
    runner: asyncio.Runner, templates: dict[str, str], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        runner.run(Renderer(templates, {}, LIMITS).render(HELLO))
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_variables_are_refused_by_name(runner: asyncio.Runner, renderer: Renderer, name: str) -> None:
    error = refused(runner, renderer.render(HELLO, variables={name: "x"}))
    assert f"{name!r}, which is reserved" in error.message
    assert error.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"a b": 1}, "'a b', which no template can read"),
        ({"x" * 200: 1}, "which no template can read"),
        ({f"v{i}": i for i in range(MAX_VARIABLES + 1)}, f"at most {MAX_VARIABLES} are allowed"),
        ({"documents": ["x"]}, "no list of objects"),
        ({"documents": 3}, "no list of objects"),
    ],
)
def test_variables_that_are_none_are_refused(
    runner: asyncio.Runner, renderer: Renderer, variables: dict[str, Any], message: str
) -> None:
    assert message in refused(runner, renderer.render(HELLO, variables=variables)).message


@pytest.mark.parametrize(
    ("template", "code", "message"),
    [
        ("{% for", "invalid_request", "no valid template: line 1"),
        ("\n{{ x ! }}", "invalid_request", "no valid template: line 2"),
        ("{{ messages[0].nothing + 'x' }}", "invalid_request", "UndefinedError"),
        ("{{ 1 / 0 }}", "invalid_request", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "invalid_request", "SecurityError"),
        ("{{ messages.append(1) }}", "invalid_request", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "invalid_request", "SecurityError"),
        ("{{ namespace(__class__=1) }}", "invalid_request", "SecurityError"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "invalid_request", "SecurityError"),
        ("{% include 'x' %}", "invalid_request", "TypeError: no loader"),
        ("{{ '\\ud800' }}", "invalid_request", "lone surrogate"),
        ("{{ '%s' * 600000 }}", "template_limit", "more than 1048576 characters"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "template_limit", "more than 1048576 characters"),
        ("{{ 'x' * 10 ** 9 }}", "template_limit", "more memory than it is given"),
        ("{{ '%999999999999d' % 1 }}", "template_limit", "more memory than it is given"),
        ("{{ range(10 ** 9) }}", "invalid_request", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "invalid_request", "RecursionError"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "invalid_request", "RecursionError"),
        ("{{ raise_exception('x' * 10000) }}", "invalid_request", "refuses these messages: x"),
        ("x" * (2**20 + 1), "template_limit", "chat_template has 1048577 characters"),
    ],
)
def test_a_bad_template_is_an_answer_and_not_a_failure(
    runner: asyncio.Runner, renderer: Renderer, template: str, code: str, message: str
) -> None:
    error = refused(runner, renderer.render(HELLO, template=template))
    assert message in error.message
    assert error.code == code
    assert len(error.message) < 1200
    assert runner.run(renderer.render(HELLO, template=PLAIN)) == "user:Hello there;"


ESCAPES = [
    "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler['__init__']['__globals__']['os'].popen('touch MARKER') }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''['format'].__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{{ ['{0.__class__}']|map('format', messages)|list }}",
    "{{ dict.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages.__class__ }}",
    "{{ (messages|first).__class__.__bases__ }}",
    "{{ joiner.__init__.__builtins__['open']('MARKER', 'w') }}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_gets_out(runner: asyncio.Runner, renderer: Renderer, template: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    work = renderer.render(HELLO, template=template.replace("MARKER", str(marker)))
    try:
        found = runner.run(work)
    except RequestError as error:
        found = error.message.partition(": ")[2]
    # What may not be read is nothing where it is printed, and an error where something is done with it.
    assert found == "" or found.startswith(("SecurityError: access to attribute", "TypeError: n"))
    assert not marker.exists()


def test_what_takes_long_is_refused_with_the_limit(runner: asyncio.Runner, short: Renderer) -> None:
    error = refused(runner, short.render(HELLO, template=ENDLESS))
    assert (error.code, error.param) == ("template_limit", "chat_template")
    assert "at most 0.3 s are allowed" in error.message


def test_a_slow_template_of_a_request_holds_up_nobody(runner: asyncio.Runner, renderer: Renderer) -> None:
    async def together() -> list[str]:
        slow = asyncio.ensure_future(renderer.render(HELLO, template=ENDLESS))
        texts = [await renderer.render(HELLO) for _ in range(20)]
        assert not slow.done()
        slow.cancel()
        await asyncio.wait([slow])
        return texts

    assert runner.run(together()) == ["user:Hello there;"] * 20


def test_a_long_conversation_is_laid_out_apart_and_a_longer_one_is_refused(
    runner: asyncio.Runner, renderer: Renderer
) -> None:
    long = [{"role": "user", "content": "x" * LONG_BYTES}]
    assert runner.run(renderer.render(long)) == f"user:{'x' * LONG_BYTES};"
    for messages in ([{"role": "user", "content": "x" * 2**20}], [{"role": "user", "content": "x"}] * 2**15):
        error = refused(runner, renderer.render(messages))
        assert (error.code, error.param) == ("context_length_exceeded", "messages")
        assert "more than 1048576 characters" in error.message


@pytest.mark.parametrize(
    ("value", "message"),
    [("\ud800", r"\ud800"), (float("nan"), "not JSON compliant"), (10**5000, "digits"), ({1, 2}, "set")],
    ids=["surrogate", "nan", "digits", "set"],
)
def test_what_is_no_json_never_reaches_a_template(
    runner: asyncio.Runner, renderer: Renderer, value: object, message: str
) -> None:
    assert message in refused(runner, renderer.render(HELLO, variables={"x": value})).message


def test_a_deep_value_is_refused(runner: asyncio.Runner, renderer: Renderer) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert "recursion" in refused(runner, renderer.render(HELLO, variables={"x": deep})).message


def test_a_closed_renderer_says_so(runner: asyncio.Runner) -> None:
    made = Renderer({"default": PLAIN}, {}, LIMITS)
    made.close()
    made.close()
    with pytest.raises(MetraleError, match="cannot be used: it is closed"):
        runner.run(made.start())
    with pytest.raises(MetraleError, match="cannot be used: it is closed"):
        runner.run(made.render(HELLO))
