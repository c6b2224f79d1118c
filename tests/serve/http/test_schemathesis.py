# SPDX-License-Identifier: MIT OR Apache-2.0
"""The app's own OpenAPI document, taken at its word against a live service: schemathesis makes requests of it.

Half of the bodies are right by the document and half are wrong. 100 bodies in the default run, `scale` times more with
--nightly. Answers are short (the model's length is 64 tokens), so that a request which is right costs little.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.service_rig import MODEL_NAME, ServiceRig, serving, write_model

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_BODIES = {"/v1/chat/completions": 30, "/v1/completions": 34, "/tokenize": 16, "/detokenize": 20}
NUM_PATHS = 10
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceRig]:
    model = write_model(tmp_path_factory.mktemp("succ"))
    with serving(model, max_model_len=64, tool_parser="hermes") as rig:
        yield rig


@pytest.fixture(scope="module")
def document(rig: ServiceRig) -> BaseSchema:
    return schemathesis.openapi.from_url(rig.url + "/openapi.json")


def send_cases(rig: ServiceRig, strategy: Any, count: int) -> set[int]:
    """Send `count` requests, check each answer, and give the statuses that came. The engine is well afterwards."""
    seen: set[int] = set()
    with requests.Session() as session:

        @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
        @given(case=strategy)
        def send(case: schemathesis.Case) -> None:
            response = case.call(session=session)
            case.validate_response(response, checks=CHECKS)
            seen.add(response.status_code)

        send()
    rig.wait_idle()
    rig.live_probe()
    return seen


@pytest.mark.parametrize("path", NUM_BODIES)
def test_bodies_that_are_right_by_the_document_get_what_it_says(
    rig: ServiceRig, document: BaseSchema, path: str, scale: int
) -> None:
    strategy = document[path]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE)
    assert 200 in send_cases(rig, strategy, NUM_BODIES[path] * scale // 2)


@pytest.mark.parametrize("path", NUM_BODIES)
def test_bodies_that_are_wrong_by_the_document_are_refused_as_it_says(
    rig: ServiceRig, document: BaseSchema, path: str, scale: int
) -> None:
    strategy = document[path]["POST"].as_strategy(generation_mode=GenerationMode.NEGATIVE)
    assert 400 in send_cases(rig, strategy, NUM_BODIES[path] * scale // 2)


def test_every_get_answers_as_the_document_says(rig: ServiceRig, document: BaseSchema, scale: int) -> None:
    gets = [found.ok() for found in document.get_all_operations() if found.ok().method == "get"]
    assert len(gets) >= 9
    for operation in gets:
        send_cases(rig, operation.as_strategy(), NUM_PATHS * scale if operation.path_parameters else 1)


def test_a_method_that_the_document_has_not_gets_405_and_the_methods_that_there_are(
    rig: ServiceRig, document: BaseSchema
) -> None:
    paths: dict[str, Any] = document.raw_schema["paths"]
    for path, operations in paths.items():
        documented = {method.upper() for method in operations}
        for method in sorted(set(METHODS) - documented):
            answer = rig.client.request(method, path.replace("{model_id}", MODEL_NAME))
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == documented
            assert method == "HEAD" or answer.json()["error"]["code"] == "method_not_allowed"
    rig.live_probe()
