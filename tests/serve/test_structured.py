# SPDX-License-Identifier: MIT OR Apache-2.0
"""From structured outputs to grammars, and grammars from strangers: what passes, what is refused, and in what time."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.grammar.texts import LAYOUT
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.structured import GrammarChecks, grammar_of
from metrale_ray.serve.text import Tokenizer, load_tokenizer
from tests.fixtures.tokenizer import END, write_tokenizer

T = TypeVar("T")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def checks(runner: asyncio.Runner) -> Iterator[GrammarChecks]:
    made = GrammarChecks(ServeLimits(grammar_timeout_s=30))  # a busy machine is slow
    yield made
    made.close()


def _run(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    return runner.run(asyncio.wait_for(work, 60))


def _parts(outputs: StructuredOutputs, tokenizer: Tokenizer | None = None) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = json.loads(grammar_of(outputs, tokenizer))["grammars"]
    return parts


def test_each_shape_becomes_a_grammar() -> None:
    assert _parts(StructuredOutputs(json={"type": "integer"})) == [
        {"json_schema": {"type": "integer", "x-guidance": LAYOUT}}
    ]
    assert _parts(StructuredOutputs(json=True)) == [{"json_schema": {"x-guidance": LAYOUT}}]
    assert _parts(StructuredOutputs(json_object=True))[0]["json_schema"]["type"] == "object"
    assert _parts(StructuredOutputs(regex="a/b")) == [{"lark_grammar": "start: /a\\/b/"}]
    assert _parts(StructuredOutputs(choice=["a", "b", "a"]))[0]["lark_grammar"].endswith('CHOICE: "a" | "b"\n')
    assert _parts(StructuredOutputs(grammar='start: "a"')) == [{"lark_grammar": 'start: "a"'}]
    assert _parts(StructuredOutputs(grammar='root ::= "a"')) == [{"lark_grammar": 'start: r0\nr0: "a"\n'}]


def test_a_shape_may_begin_behind_a_text_or_behind_the_special_token_that_it_is(tokenizer: Tokenizer) -> None:
    first, shape = _parts(StructuredOutputs(choice=["a"], after="</think>"), tokenizer)
    assert 'suffix="</think>"' in first["lark_grammar"]
    assert shape["name"] == "shape"
    first, _ = _parts(StructuredOutputs(choice=["a"], after=END), tokenizer)
    assert "<[0]>" in first["lark_grammar"]
    first, _ = _parts(StructuredOutputs(choice=["a"], after="</think>", opening=END), tokenizer)
    assert ("<[0]>" in first["lark_grammar"], 'suffix="</think>"' in first["lark_grammar"]) == (True, True)


def test_what_allows_nothing_or_is_no_grammar_is_refused_by_the_name_of_the_field() -> None:
    for outputs in (StructuredOutputs(json="false"), StructuredOutputs(grammar="root ::= nope")):
        with pytest.raises(RequestError) as caught:
            grammar_of(outputs, None)
        assert (caught.value.code, caught.value.param) == ("invalid_grammar", "structured_outputs")


def test_what_was_checked_is_sent_as_a_grammar(runner: asyncio.Runner, checks: GrammarChecks) -> None:
    given = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, temperature=0.5, stop="x")
    checked = _run(runner, checks.checked(given, None))
    assert given.structured_outputs is not None
    assert checked.structured_outputs is None
    assert checked.grammar == grammar_of(given.structured_outputs, None)
    assert (checked.temperature, checked.stop) == (0.5, ("x",))
    plain = SamplingParams()
    assert _run(runner, checks.checked(plain, None)) is plain


HOSTILE: dict[str, dict[str, Any]] = {
    "an open group": {"regex": "("},
    "a look-behind": {"regex": "(?<=x)*"},
    "5000 open groups": {"regex": "(" * 5000},
    "5000 groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "a property that is no schema": {"json": {"properties": {"foo": "bar"}}},
    "a reference over the network": {"json": {"$ref": "http://127.0.0.1:1/x.json"}},
    "half a grammar": {"grammar": 'start: "a" b'},
    "groups without end": {"grammar": "start: " + "(" * 60_000},
}
LEGAL: dict[str, dict[str, Any]] = {
    "an empty alternative": {"regex": "^(|.*)$"},
    "what makes others back-track": {"regex": "(a+)+$"},
    "counts of counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a reference to itself": {"json": {"$ref": "#"}},
    "many states": {"regex": "(a|b)*a(a|b){200}"},
    "a large maximum": {"json": {"type": "integer", "maximum": 20_000_000_000}},
    "anything": {"json": {}},
    "true": {"json": True},
    "nested a hundred deep": {"json": '{"properties":{"a":' * 50 + "{}" + "}}" * 50},
    "a long enum": {"json": {"enum": [f"value{number}" for number in range(8000)]}},
    "500 properties": {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}}},
    "a chain of 3000 rules": {
        "grammar": "\n".join(["start: r0", *(f'r{n}: "{n % 9}" r{n + 1}' for n in range(3000)), 'r3000: "e"'])
    },
    "a chain of 800 references": {
        "json": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(800)}
            | {"d800": {"type": "integer"}},
        }
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_shape_is_refused_with_its_reason(runner: asyncio.Runner, checks: GrammarChecks, name: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**HOSTILE[name]))
    with pytest.raises(RequestError) as caught:
        _run(runner, checks.checked(params, None))
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "structured_outputs")
    assert 30 < len(caught.value.message) < 1000


@pytest.mark.parametrize("name", LEGAL)
def test_an_unusual_shape_that_can_be_had_is_taken(runner: asyncio.Runner, checks: GrammarChecks, name: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**LEGAL[name]))
    assert _run(runner, checks.checked(params, None)).grammar


def test_a_text_that_takes_too_long_is_ended_and_the_next_one_is_checked(runner: asyncio.Runner) -> None:
    large = "start: " + " | ".join(f'"{number}" start' for number in range(9000))  # takes a third of a second
    checks = GrammarChecks(ServeLimits(grammar_timeout_s=0.05))
    try:
        with pytest.raises(RequestError, match=r"takes more than 0\.05 s to compile") as caught:
            _run(runner, checks.check(large))
        assert caught.value.code == "invalid_grammar"
        checks._timeout_s = 30  # a busy machine may take long for this, too
        _run(runner, checks.check('start: "a"'))
    finally:
        checks.close()


def test_the_loop_goes_on_while_a_large_text_is_checked(runner: asyncio.Runner, checks: GrammarChecks) -> None:
    text = "start: " + " | ".join(f'"{number}" start' for number in range(9000))

    async def beats() -> int:
        check = asyncio.ensure_future(checks.check(text))
        count = 0
        while not check.done():
            await asyncio.sleep(0)
            count += 1
        check.result()
        return count

    assert _run(runner, beats()) > 100


def test_a_process_that_was_ended_is_replaced(runner: asyncio.Runner, checks: GrammarChecks) -> None:
    _run(runner, checks.check('start: "first"'))
    process = checks._small._process
    assert process is not None
    process.kill()
    process.wait()
    _run(runner, checks.check('start: "second"'))


SLOW = "start: " + " | ".join(f'"{number}" start' for number in range(800))  # small, and takes longer than a short one


async def _started(checks: GrammarChecks) -> list[int | None]:
    cells = (checks._short, checks._small)
    await asyncio.gather(*(cell.start() for cell in cells))
    return [cell.pid for cell in cells]


def test_a_short_text_waits_for_no_other_one_that_takes_long(runner: asyncio.Runner, checks: GrammarChecks) -> None:
    async def race(slow: list[str]) -> bool:
        await _started(checks)
        ahead = [asyncio.ensure_future(checks.check(text)) for text in slow]
        await asyncio.sleep(0)
        process = checks._small._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # so it takes as long as it is let
        try:
            await checks.check(f'start: "quick" | "{len(slow)}"')
            is_first = not any(one.done() for one in ahead)
        finally:
            process.send_signal(signal.SIGCONT)
        await asyncio.gather(*ahead)
        return is_first

    assert _run(runner, race(['start: "short"']))
    assert _run(runner, race([f'{SLOW} | "{number}"' for number in range(4)]))


def test_a_client_that_leaves_takes_no_process_with_it(runner: asyncio.Runner, checks: GrammarChecks) -> None:
    async def leave() -> None:
        pids = await _started(checks)
        leaving = [asyncio.ensure_future(checks.check(f'{SLOW} | "left{number}"')) for number in range(6)]
        for _ in range(3):
            await asyncio.sleep(0)
        for one in leaving:
            one.cancel()
        await asyncio.wait(leaving)
        await checks.check(f'{SLOW} | "next"')
        assert [checks._short.pid, checks._small.pid] == pids

    _run(runner, leave())


def test_what_is_known_needs_no_process(runner: asyncio.Runner) -> None:
    checks = GrammarChecks(ServeLimits(grammar_timeout_s=30))
    _run(runner, checks.check('start: "a"'))
    checks.close()
    _run(runner, checks.check('start: "a"'))


def test_a_front_without_the_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match="metrale-ray\\[serve\\]") as caught:
        grammar_of(StructuredOutputs(regex="a"), None)
    assert caught.value.code == "invalid_grammar"
    assert grammar_of(StructuredOutputs(choice=["a"]), None)
