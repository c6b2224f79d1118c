# SPDX-License-Identifier: MIT OR Apache-2.0
"""`HttpSettings`: what the owner of a service decides of its HTTP side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from metrale_ray.errors import ConfigError
from metrale_ray.serve.openai.call import ApiSettings

LIVE_PATH = "/health/live"
"""The one path that never needs a key: whoever restarts processes has to ask it."""


PACKAGE = "metrale-ray"


def _own_version() -> dict[str, str]:
    return {"version": version(PACKAGE)}


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """`api_keys`: those that open every route but the admin ones; none at all: every route is open to whoever connects.

    `admin_keys`: those that open the admin routes, and all others too. `open_paths`: paths whose GET needs no key,
    beside liveness, exactly as they are written here. `cors_origins`: web pages of these origins may ask; "*" for all.
    `versions`: what GET /version says. Raises ConfigError.
    """

    api: ApiSettings = field(default_factory=ApiSettings)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    open_paths: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=_own_version)

    def __post_init__(self) -> None:
        for path in self.open_paths:
            if not path.startswith("/"):
                raise ConfigError(f"open_paths has {path!r}; a path begins with /, such as /metrics")
            if path.startswith("/admin"):
                raise ConfigError(f"open_paths has {path!r}; an admin route cannot be open. Remove it.")
        if any(not key for key in (*self.api_keys, *self.admin_keys)):
            raise ConfigError("a key is empty, which everybody would know; give another one, or none at all")

    @property
    def keyless_paths(self) -> tuple[str, ...]:
        """All paths whose GET needs no key."""
        return (LIVE_PATH, *self.open_paths)
