# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether somebody listens at an address."""

from __future__ import annotations

import socket

import pytest

from metrale_ray.cluster.session import RaySession
from metrale_ray.errors import StartError
from metrale_ray.reach import why_silent, why_unreachable


@pytest.fixture
def dead_address() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_door_that_is_open_is_no_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        assert why_silent(f"127.0.0.1:{door.getsockname()[1]}") is None


def test_a_door_that_is_closed_is_told(dead_address: str) -> None:
    assert why_silent(dead_address) == "Connection refused"
    assert why_unreachable("no-such-host.invalid", 1) is not None


@pytest.mark.parametrize("address", ["auto", "local", "ray://127.0.0.1:1", "", ":1", "name"])
def test_what_ray_resolves_by_itself_is_left_to_it(address: str) -> None:
    assert why_silent(address) is None


def test_an_engine_for_a_ray_that_is_not_there_is_refused_at_once(dead_address: str) -> None:
    with pytest.raises(StartError, match=f"cannot reach Ray at '{dead_address}': Connection refused"):
        RaySession().join(dead_address)
