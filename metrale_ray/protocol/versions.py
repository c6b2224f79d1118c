# SPDX-License-Identifier: MIT OR Apache-2.0
"""Protocol versions: what each one sends, and the one place where the choice is resolved.

The head's choice is: the flag or setting, then METRALE_EP_PROTOCOL, then v2. It is resolved once and given to every
rank. A worker built by hand without a configuration reads the variable itself, and there unset means v1.
"""

from __future__ import annotations

from enum import IntEnum

from metrale_ray.errors import ConfigError

ENV_VAR = "METRALE_EP_PROTOCOL"


class ProtocolVersion(IntEnum):
    """V1 sends no `seq_id`, so every command means slot 0; V2 names the slot."""

    V1 = 1
    V2 = 2

    @property
    def label(self) -> str:
        """The name that flags and the environment use: "v1" or "v2"."""
        return f"v{self.value}"


def parse_version(text: str, source: str) -> ProtocolVersion:
    """The version that `text` names. `source` says where the text came from, for the error."""
    for version in ProtocolVersion:
        if text == version.label:
            return version
    raise ConfigError(f"{source} is {text!r}; allowed are 'v1' and 'v2'. Set one of these, or leave it out for v2.")


def resolve_version(setting: str | None, environment: str | None) -> ProtocolVersion:
    """The head's choice: the setting, then the environment variable's value, then v2."""
    if setting is not None:
        return parse_version(setting, "ep_protocol")
    if environment is not None:
        return parse_version(environment, ENV_VAR)
    return ProtocolVersion.V2


def worker_default_version(environment: str | None) -> ProtocolVersion:
    """The choice of a worker that was given no configuration: the variable's value, then v1."""
    return ProtocolVersion.V1 if environment is None else parse_version(environment, ENV_VAR)
