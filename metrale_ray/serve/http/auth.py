# SPDX-License-Identifier: MIT OR Apache-2.0
"""`KeyCheck`: nobody gets past it without a key, whatever the path, but to the few GETs that are listed as open.

Rules. The check comes before the router and knows nothing of routes: what is not exactly on the list needs a key, so a
new route, another spelling of a path and a path that does not exist all do. Keys are compared by digests, all of them
each time, so that time tells nothing of them. They are never logged. An admin key opens everything; admin routes ask
`require_admin` besides, at the route itself, so that no spelling of a path leads past it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.errors import error_response
from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.http.visit import Role, visit_of

DIGEST_FORM = re.compile(r"sha256:[0-9a-f]{64}")
CHALLENGE = {"WWW-Authenticate": "Bearer"}


class KeyCheck:
    """An ASGI middleware. Without any API key every route is open; admin keys count nevertheless."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._api_keys = _digests(settings.api_keys)
        self._admin_keys = _digests(settings.admin_keys)
        self._open_paths = frozenset(settings.keyless_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it with 401."""
        if scope["type"] == "http":
            try:
                visit_of(scope).role = self._role(scope)
            except ApiError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _role(self, scope: Scope) -> Role:
        if scope["method"] == "GET" and route_path(scope) in self._open_paths:
            return "anyone"
        given = Headers(scope=scope).getlist("authorization")
        role = self._role_of_key(given)
        if role == "anyone" and self._api_keys:
            raise _refusal(given)
        return role

    def _role_of_key(self, given: Sequence[str]) -> Role:
        key = _bearer(given)
        if key is None:
            return "anyone"
        digest = _digest(key)
        is_api, is_admin = _is_among(digest, self._api_keys), _is_among(digest, self._admin_keys)
        return "admin" if is_admin else "api" if is_api else "anyone"


def require_admin(settings: HttpSettings, request: Request) -> None:
    """Raises ApiError unless the request may see admin routes: by an admin key, or on a service without any key."""
    if visit_of(request.scope).role == "admin" or not (settings.api_keys or settings.admin_keys):
        return
    if not settings.admin_keys:
        message = "admin routes are closed: the service has API keys and no admin key. Start it with an admin key."
        raise ApiError(403, message, code="admin_key_required")
    if visit_of(request.scope).role == "api":
        raise ApiError(403, "an API key opens no admin route; send an admin key", code="admin_key_required")
    raise ApiError(401, "admin routes need an admin key: Authorization: Bearer KEY", code="no_key", headers=CHALLENGE)


def route_path(scope: Scope) -> str:
    """The path as the router sees it: without the prefix under which the app is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _bearer(given: Sequence[str]) -> str | None:
    """The key in the one Authorization header of the scheme Bearer, or None."""
    if len(given) != 1:
        return None
    scheme, _, key = given[0].strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _refusal(given: Sequence[str]) -> ApiError:
    if not given:
        message, code = "no API key was given; send the header Authorization: Bearer KEY", "no_key"
    elif len(given) > 1:
        message, code = f"{len(given)} Authorization headers were given; send one", "invalid_api_key"
    elif _bearer(given) is None:
        message, code = "the Authorization header holds no key; its form is: Bearer KEY", "invalid_api_key"
    else:
        message, code = "this API key is not known here", "invalid_api_key"
    return ApiError(401, message, code=code, headers=CHALLENGE)


def by_digest(key: str) -> str:
    """`key` as its digest, in the form in which an option may hold it: whoever reads that does not know the key."""
    return key if DIGEST_FORM.fullmatch(key) else f"sha256:{_digest(key).hex()}"


def _digests(keys: Sequence[str]) -> tuple[bytes, ...]:
    """Of keys as the options hold them, plain or as digests."""
    return tuple(bytes.fromhex(by_digest(key).removeprefix("sha256:")) for key in keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    return any([hmac.compare_digest(digest, one) for one in known])  # noqa: C419  # a list: all are compared
