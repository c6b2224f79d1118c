# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import json
import re
from typing import Any

from metrale_ray.serve.http.settings import HttpSettings
from tests.serve.http.asgi import app_of, ask


def document(settings: HttpSettings | None = None) -> dict[str, Any]:
    app = app_of(settings)
    headers = [("authorization", "Bearer user-key")]
    return dict(ask(app, "GET", "/openapi.json", headers).json)


def test_every_route_is_described_and_every_reference_leads_somewhere() -> None:
    app, described = app_of(), document()
    paths = {route.path.replace(":path", "") for route in app.routes if route.path != "/openapi.json"}  # type: ignore[attr-defined]
    assert set(described["paths"]) == paths
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(described))) <= known
    assert {f"#/components/schemas/{name}Request" for name in ("Chat", "Completion", "Tokenize", "Detokenize")} <= known


def test_every_route_with_a_body_names_its_model_and_its_refusals() -> None:
    posts = {path: methods["post"] for path, methods in document()["paths"].items() if "post" in methods}
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= set(posts)
    for operation in posts.values():
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert {"200", "400", "404", "408", "413", "415", "500", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
    assert {"429", "504"} <= set(posts["/v1/completions"]["responses"])
    assert "text/event-stream" in posts["/v1/completions"]["responses"]["200"]["content"]


def test_keys_are_asked_for_where_they_are_needed_and_nowhere_else() -> None:
    assert "security" not in json.dumps(document())
    described = document(HttpSettings(api_keys=("user-key",), open_paths=("/metrics",)))
    assert described["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            is_open = path in ("/health/live", "/metrics")
            assert ("security" in operation, "401" in operation["responses"]) == (not is_open, not is_open)
    assert "403" in described["paths"]["/admin/state"]["get"]["responses"]
