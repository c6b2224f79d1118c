# SPDX-License-Identifier: MIT OR Apache-2.0
"""Paths that OpenAI's or vLLM's servers have and this one has not: their 404 says so, and what to use."""

from __future__ import annotations

from metrale_ray.serve.failures import ApiError

_CHAT = "use /v1/chat/completions"
NOT_SUPPORTED = {
    "/v1/responses": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/conversations": _CHAT,
    "/v1/embeddings": None,
    "/v1/audio": None,
    "/v1/images": None,
    "/v1/videos": None,
    "/v1/moderations": None,
    "/v1/files": None,
    "/v1/uploads": None,
    "/v1/batches": "send the requests one by one, many at once",
    "/v1/fine_tuning": None,
    "/v1/assistants": _CHAT,
    "/v1/threads": _CHAT,
    "/v1/vector_stores": None,
    "/v1/containers": None,
    "/v1/evals": None,
    "/v1/realtime": _CHAT,
    "/v1/rerank": None,
    "/v2/rerank": None,
    "/v1/score": None,
    "/v1/load_lora_adapter": None,
    "/v1/unload_lora_adapter": None,
    "/embeddings": None,
    "/pooling": None,
    "/classify": None,
    "/rerank": None,
    "/score": None,
    "/invocations": "use /v1/chat/completions or /v1/completions",
    "/generate": "use /v1/completions",
}
"""The path (and all below it), and what there is instead; None: nothing."""


def not_found(method: str, path: str) -> ApiError:
    """The 404 for a path that no route has."""
    for known, instead in NOT_SUPPORTED.items():
        if path == known or path.startswith(known + "/"):
            hint = "" if instead is None else f"; {instead}"
            return ApiError(404, f"{known} is not supported yet{hint}", code="not_supported")
    return ApiError(404, f"there is no {method} {path[:200]}; GET /openapi.json lists the routes", code="not_found")
