# SPDX-License-Identifier: MIT OR Apache-2.0
"""Structured outputs over HTTP, good and hostile ones, beside a stream that must not stand still."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service_rig import MODEL_NAME, ServiceRig, serving, write_model

END = 0
MAX_GAP_S = 1.5
"""A step takes a few milliseconds; what a grammar may hold up is far below this on any machine that runs tests."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceRig]:
    model = write_model(tmp_path_factory.mktemp("succ"), eos_token_id=END)
    with serving(model, max_batch_size=8) as rig:
        yield rig


class Stream:
    """A long answer that is read in a thread of its own, and the longest time that nothing came."""

    def __init__(self, rig: ServiceRig) -> None:
        self.largest_gap_s = 0.0
        self.num_lines = 0
        self._rig = rig
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        assert self._has_begun.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        body = {"model": MODEL_NAME, "prompt": [5], "max_tokens": 3900, "temperature": 0, "ignore_eos": True}
        while not self._is_over.is_set():
            with self._rig.new_client() as client:
                self._read_one(client, {**body, "stream": True})

    def _read_one(self, client: Any, body: dict[str, Any]) -> None:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            last_s = time.monotonic()
            for _ in answer.iter_lines():
                now_s = time.monotonic()
                self.largest_gap_s = max(self.largest_gap_s, now_s - last_s)
                last_s = now_s
                self.num_lines += 1
                self._has_begun.set()
                if self._is_over.is_set():
                    return


def asked(rig: ServiceRig, **fields: Any) -> Any:
    body = {"model": MODEL_NAME, "prompt": [5], "max_tokens": 40, "temperature": 0, **fields}
    return rig.client.post("/v1/completions", json=body)


HOSTILE: dict[str, dict[str, Any]] = {
    "an open group": {"regex": "("},
    "a look-behind": {"regex": "(?<=x)*"},
    "5000 open groups": {"regex": "(" * 5000},
    "a property that is no schema": {"json": {"properties": {"foo": "bar"}}},
    "a thousand deep": {"json": '{"properties":{"a":' * 1000 + "{}" + "}}" * 1000},
    "an enum of 100000": {"json": json.dumps({"enum": [f"value{number}" for number in range(100_000)]})},
    "no text at all": {"json": "false"},
    "half a grammar": {"grammar": "root ::= nope"},
    "a reference to itself": {"json": {"$ref": "#"}},
}
LEGAL: dict[str, dict[str, Any]] = {
    "an empty alternative": {"regex": "^(|.*)$"},
    "what makes others back-track": {"regex": "(a+)+$"},
    "a large maximum": {"json": {"type": "integer", "maximum": 20_000_000_000}},
    "an empty schema": {"json": {}},
    "true": {"json": "true"},
    "counts of counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
}


def test_hostile_shapes_are_refused_or_right_and_a_stream_beside_them_goes_on(rig: ServiceRig) -> None:
    with Stream(rig) as stream:
        for name, shape in {**HOSTILE, **LEGAL}.items():
            answer = asked(rig, structured_outputs=shape)
            told = answer.json()
            if name in HOSTILE:
                assert (answer.status_code, told["error"]["type"]) == (400, "invalid_request_error"), (name, told)
            else:
                assert answer.status_code == 200, (name, told)
            assert answer.elapsed.total_seconds() < 20, name
            rig.live_probe()
        lines = stream.num_lines
        assert lines > 0
    assert stream.largest_gap_s < MAX_GAP_S


def test_each_kind_of_shape_is_obeyed(rig: ServiceRig) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    cases: list[dict[str, Any]] = [{"json": schema}, {"regex": "[x-z]{3}"}, {"choice": ["yes", "no"]}]
    cases.append({"grammar": 'root ::= "q" [0-9]'})
    texts = []
    for shape in cases:
        answer = asked(rig, structured_outputs=shape)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        texts.append(choice["text"])
    assert json.loads(texts[0])["kind"] in ("a", "b")
    assert set(texts[1]) <= set("xyz")
    assert len(texts[1]) == 3
    assert texts[2] in ("yes", "no")
    assert (texts[3][0], len(texts[3])) == ("q", 2)


def test_log_probabilities_of_a_choice_of_two_are_finite(rig: ServiceRig) -> None:
    answer = asked(rig, structured_outputs={"choice": ["yes", "no"]}, logprobs=5)
    assert answer.status_code == 200
    told = json.loads(answer.content, parse_constant=lambda name: pytest.fail(name))
    values = told["choices"][0]["logprobs"]["token_logprobs"]
    assert values
    assert all(-1e5 < value <= 0 for value in values)


def test_chats_take_response_formats(rig: ServiceRig) -> None:
    formats = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [{"a": [1]}]}}},
    ]
    for one in formats:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "response_format": one}
        answer = rig.client.post("/v1/chat/completions", json={**body, "max_tokens": 400, "seed": 1})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["finish_reason"] == "stop"  # of the schema that has one text
    assert json.loads(choice["message"]["content"]) == {"a": [1]}


def test_a_client_that_goes_while_its_grammar_is_made_leaves_nothing(rig: ServiceRig, tmp_path: Path) -> None:
    for number in range(3):
        with rig.new_client() as client:
            body = {"model": MODEL_NAME, "prompt": [5], "max_tokens": 3000, "stream": True}
            shape = {"regex": f"x{{{number + 2000}}}"}
            with client.stream("POST", "/v1/completions", json={**body, "structured_outputs": shape}):
                pass
    rig.wait_idle()
    rig.live_probe()
