# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which Ray is meant: the address that was asked for, beside that of the Ray which this process has joined already."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import ray

from metrale_ray.errors import ConfigError


def check_address(asked: str | None) -> None:
    """Refuse an address other than that of the Ray which this process has joined already, where both are known.

    Raises ConfigError.
    """
    if asked is None or not ray.is_initialized():
        return
    joined = str(getattr(ray.get_runtime_context(), "gcs_address", ""))  # a client of Ray does not know it
    here, there = _host_and_port(joined), _host_and_port(asked)
    if here is None or there is None or here == there:
        return
    # A node is reached by its loopback address too.
    if here[1] == there[1] and (here[0].is_loopback or there[0].is_loopback):
        return
    raise ConfigError(
        f"address is {asked!r}, and this process has joined the Ray at {joined!r}; leave address out to use that one, "
        "or call ray.shutdown() before"
    )


def _host_and_port(address: str) -> tuple[IPv4Address | IPv6Address, int] | None:
    """Of an address in numbers; None for a name, which may be that of any host."""
    host, _, port = address.rpartition(":")
    try:
        return ip_address(host.strip("[]")), int(port)
    except ValueError:
        return None
