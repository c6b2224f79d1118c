# SPDX-License-Identifier: MIT OR Apache-2.0
"""Grammars for calls of tools: what follows one is read by the family's parser as calls that the request allows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from metrale_ray.errors import RequestError
from metrale_ray.grammar.constraint import Constraint, masks
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.grammar.texts import Mark, grammar_text, of_grammar
from metrale_ray.sampling.structured import MAX_SCHEMA_CHARACTERS, StructuredOutputs
from metrale_ray.serve.parsing.choose import make_parser
from metrale_ray.serve.parsing.forms import special_ids
from metrale_ray.serve.parsing.names import TOOL_PARSERS
from metrale_ray.serve.parsing.tool_grammar import tool_grammar
from metrale_ray.serve.text import Tokenizer
from tests.fixtures.tokenizer import write_tokenizer
from tests.serve.parsing.reading import Answer, read

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "</tool_call>"]}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
WEATHER, NOW = ("weather", '{"city": "Oslo"}'), ("now", "{}")
MARKS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "<think>", "</think>"]


class Model:
    """A tokenizer whose special tokens are `marks`, and grammars over it."""

    def __init__(self, folder: Path, marks: list[str]) -> None:
        write_tokenizer(folder)
        rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
        rust.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
        rust.save(str(folder / "tokenizer.json"))
        inner = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>")
        self.tokenizer = Tokenizer(inner, [inner.eos_token_id])
        self.grammars = Grammars(folder, len(inner), [inner.eos_token_id])

    def ids(self, family: str) -> dict[str, int]:
        """The family's special tokens in this tokenizer."""
        return special_ids(family, self.tokenizer)

    def constraint(self, grammar: str | None, *, thinks: bool = False) -> Constraint:
        """The beginning of an answer under a grammar; `thinks`: it may begin with reasoning."""
        assert grammar is not None
        shape = StructuredOutputs(grammar=grammar).grammar
        assert shape is not None
        marks = [Mark(text, self.tokenizer.special_token_id(text)) for text in ("</think>", "<think>") if thinks]
        return self.grammars.compile(grammar_text(of_grammar(shape), *marks))

    def allows(self, grammar: str | None, text: str, *, thinks: bool = False) -> bool:
        """Whether a whole answer may be `text`."""
        constraint = self.constraint(grammar, thinks=thinks)
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            mask = masks([constraint])[0]
            assert not isinstance(mask, str)
            if not mask[token_id]:
                return False
            constraint.advance(token_id)
        return constraint.may_end

    def wander(self, grammar: str | None, chance: random.Random, max_tokens: int) -> tuple[str, bool]:
        """An answer of random tokens that a grammar allows, and whether it came to its end."""
        constraint, ids = self.constraint(grammar), []
        for _ in range(max_tokens):
            mask = masks([constraint])[0]
            assert not isinstance(mask, str)
            allowed = [int(i) for i in mask.nonzero()[0] if i not in self.tokenizer.eos_token_ids]
            if not allowed or (constraint.may_end and chance.random() < 0.5):
                break
            ids.append(chance.choice(allowed))
            constraint.advance(ids[-1])
        return self.tokenizer.decode(ids, skip_special_tokens=False), constraint.may_end


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("plain"), [])


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("special"), MARKS)


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


def mistral(*calls: tuple[str, str]) -> str:
    each = [f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls]
    return f"[TOOL_CALLS] [{', '.join(each)}]"


def mistral_named(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)


Writer = Callable[..., str]
WAYS: list[tuple[str | None, str, Writer]] = [
    ("hermes", "plain", hermes),
    ("hermes", "special", hermes),
    (None, "plain", hermes),
    ("mistral", "plain", mistral),
    ("mistral", "special", mistral_named),
    ("llama3_json", "plain", llama),
    ("llama3_json", "special", llama),
]


@pytest.mark.parametrize(("family", "model_name", "write"), WAYS)
def test_an_enforced_answer_is_calls_of_the_given_tools_alone(
    family: str | None, model_name: str, write: Writer, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(model_name)
    ids = model.ids(family or "")
    required = tool_grammar(TOOLS, "required", family, True, ids)
    single = tool_grammar(TOOLS, "required", family, False, ids)
    named = tool_grammar(TOOLS, NAMED, family, True, ids)
    texts = [write(WEATHER), write(NOW), write(WEATHER, NOW), write(WEATHER, WEATHER)]
    assert [model.allows(required, text) for text in texts] == [True, True, True, True]
    assert [model.allows(single, text) for text in texts] == [True, True, False, False]
    assert [model.allows(named, text) for text in texts] == [True, False, False, False]
    wrong = [
        "",
        "Hi",
        f"Hi {texts[0]}",
        f"{texts[0]} ok",
        write(("other", "{}")),
        write(("weather", "{}")),
        write(("now", '{"a": 1}')),
        texts[0][:-1],
    ]
    assert not any(model.allows(required, text) for text in wrong)


@pytest.mark.parametrize(("family", "model_name", "write"), WAYS)
def test_the_parser_reads_whatever_a_grammar_lets_a_model_write(
    family: str | None, model_name: str, write: Writer, request: pytest.FixtureRequest, scale: int
) -> None:
    model: Model = request.getfixturevalue(model_name)
    grammar = tool_grammar(TOOLS, "required", family, True, model.ids(family or ""))
    for seed in range(3 * scale):
        text, is_whole = model.wander(grammar, random.Random(seed), 400)
        answer = read(make_parser(family, None, TOOLS, "required"), [text])
        assert answer.content == ""
        assert answer.has_calls or not is_whole
        for name, arguments in answer.calls[: len(answer.calls) if is_whole else -1]:
            assert name in ("weather", "now")
            assert set(json.loads(arguments)) == ({"city"} if name == "weather" else set())


@pytest.mark.parametrize(("family", "model_name", "write"), WAYS)
def test_a_name_may_begin_another_one(
    family: str | None, model_name: str, write: Writer, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(model_name)
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "f2", "f2-b.c")]
    grammar = tool_grammar(tools, "required", family, True, model.ids(family or ""))
    names = ("f2", "f", "f2-b.c", "f")
    assert [model.allows(grammar, write(*((name, "{}") for name in given))) for given in (names, ("f2-",))] == [
        True,
        False,
    ]


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
FREE_WAYS = [way for way in WAYS if way[0] is not None]


@pytest.mark.parametrize(("family", "model_name", "write"), FREE_WAYS)
def test_a_strict_function_is_called_by_its_schema_and_the_rest_is_free(
    family: str, model_name: str, write: Writer, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(model_name)
    grammar = tool_grammar(STRICT, "auto", family, True, model.ids(family))
    tag = "<|python_tag|>" if family == "llama3_json" else ""
    busy = ("now", '{"a": [1]}')
    good = ["", "Hi < [ there", write(WEATHER), f"Hi {tag}{write(busy, WEATHER)}"]
    wrong = [write(("weather", '{"city": 1}')), f"Hi {tag}{write(('other', '{}'))}", f"Hi {tag}{write(NOW)[:-3]}"]
    assert [model.allows(grammar, text) for text in good] == [True] * len(good)
    assert [model.allows(grammar, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(("family", "model_name", "write"), FREE_WAYS)
def test_reasoning_before_calls_is_free_and_what_is_behind_it_is_not(
    family: str, model_name: str, write: Writer, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(model_name)
    free = tool_grammar(STRICT, "auto", family, True, model.ids(family))
    required = tool_grammar(TOOLS, "required", family, True, model.ids(family))
    wrong = write(("weather", '{"city": 1}'))
    # A special token that begins a call is none within reasoning; what is written like one is text.
    thoughts = "<think>hm, a call\n</think>\n\n" if model_name == "special" else f"<think>{wrong}\n</think>\n\n"
    for grammar in (free, required):
        assert model.allows(grammar, write(WEATHER), thinks=True)
        assert model.allows(grammar, thoughts + write(WEATHER), thinks=True)
        assert not model.allows(grammar, thoughts + wrong, thinks=True)
        assert not model.allows(grammar, wrong, thinks=True)
    assert [model.allows(free, text, thinks=True) for text in ("Hi", f"{thoughts}Hi", "<think>Hi")] == [
        True,
        True,
        False,
    ]
    assert not model.allows(required, f"{thoughts}Hi", thinks=True)


@pytest.mark.parametrize(("family", "model_name", "write"), FREE_WAYS)
def test_without_parallel_calls_a_free_answer_has_one_at_most(
    family: str, model_name: str, write: Writer, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(model_name)
    grammar = tool_grammar(TOOLS, None, family, False, model.ids(family))
    assert [model.allows(grammar, text) for text in ("Hi", write(NOW), write(NOW, NOW))] == [True, True, False]


@pytest.mark.parametrize(("family", "model_name", "write"), FREE_WAYS)
def test_an_answer_with_a_schema_of_its_own_is_json_of_it_or_calls(
    family: str, model_name: str, write: Writer, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(model_name)
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    grammar = tool_grammar(TOOLS, "auto", family, True, model.ids(family), schema)
    tag = "<|python_tag|>" if family == "llama3_json" else ""
    calls = [tag + write(NOW, WEATHER), tag + write(("weather", '{"a": 1}')), f'{tag}{write(NOW)}{{"a":1}}']
    texts = ['{"a":1}', *calls[:2], "Hi", '{"a":""}', calls[2]]
    assert [model.allows(grammar, text) for text in texts] == [True, True, True, False, False, False]
    anything = tool_grammar(TOOLS, "auto", family, True, model.ids(family), "true")
    assert [model.allows(anything, text) for text in ("[1]", tag + write(NOW), "Hi")] == [True, True, False]


@pytest.mark.parametrize("family", [*TOOL_PARSERS, None])
def test_no_grammar_where_none_is_needed(family: str | None) -> None:
    assert tool_grammar(TOOLS, "auto", family) is None
    assert tool_grammar(TOOLS, None, family) is None
    assert tool_grammar(STRICT, "none", family) is None
    assert tool_grammar([], "required", family) is None
    assert tool_grammar(STRICT, "auto", None) is None


@pytest.mark.parametrize(
    ("parameters", "good", "wrong"),
    [
        (None, ["{}"], ['{"a": 1}']),
        ({}, ["{}"], ['{"a": 1}']),
        ({"properties": {"a": {"type": "integer"}}}, ["{}", '{"a": 1}'], ['{"a": ""}', '{"b": 1}', '"a"']),
        ({"type": "object", "additionalProperties": True, "properties": {}}, ['{"b": 1}'], ["[]"]),
        ({"type": "object", "required": ["b"], "properties": {}}, ['{"b": 1}'], ["{}"]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"required": ["a"]}}}, ['{"a": 1}'], ["{}", "1"]),
        ({"x-guidance": {"whitespace_flexible": True}}, ["{}"], ["{ }"]),
    ],
)
def test_arguments_are_an_object_by_the_functions_schema(
    plain: Model, parameters: dict[str, Any] | None, good: list[str], wrong: list[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = tool_grammar(tools, "required", "llama3_json")
    assert [model_text for model_text in good if not plain.allows(grammar, llama(("f", model_text)))] == []
    assert [model_text for model_text in wrong if plain.allows(grammar, llama(("f", model_text)))] == []


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": ["object", "null"]}, {"type": None}, "x", True])
def test_parameters_that_are_no_object_are_refused_by_their_place(parameters: Any) -> None:
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for choice in ("required", "auto", {"type": "function", "function": {"name": "now"}}):
        with pytest.raises(RequestError, match="must be a JSON schema of an object") as refusal:
            tool_grammar(tools, choice, "hermes")
        assert refusal.value.param == "tools[1].function.parameters"


def test_schemas_that_are_too_large_together_are_refused() -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"title": "x" * (MAX_SCHEMA_CHARACTERS // 4)}}}
        for i in range(4)
    ]
    with pytest.raises(RequestError, match="Give fewer tools") as refusal:
        tool_grammar(tools, "required", "hermes")
    assert refusal.value.param == "tools"


def test_a_text_that_looks_like_another_grammar_stays_a_schema(plain: Model) -> None:
    parameters = {"type": "object", "description": "x\nroot ::= 1\nstart: %json {", "properties": {}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert plain.allows(tool_grammar(tools, "required", "hermes"), hermes(("f", "{}")))


def test_an_enforced_call_is_read_as_it_comes_from_the_special_tokens(special: Model) -> None:
    text = mistral_named(WEATHER, NOW)
    ids = special.tokenizer.encode(text, add_special_tokens=False)
    parts = [special.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
    assert "[TOOL_CALLS]" in parts
    assert read(make_parser("mistral", None, TOOLS, "required"), parts) == Answer("", [WEATHER, NOW], True)
