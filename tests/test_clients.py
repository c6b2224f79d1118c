# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which sequence of which front's request is which request of the engine."""

from __future__ import annotations

from metrale_ray.clients import Client, Clients
from metrale_ray.protocol.front import FrontId
from metrale_ray.scheduler.request import RequestId

ONE, TWO = FrontId(1), FrontId(2)


def test_each_sequence_has_an_id_of_its_own_and_is_found_both_ways() -> None:
    clients = Clients()
    first, second = clients.add(ONE, 7, 2), clients.add(TWO, 7, 1)
    assert len({*first, *second}) == 3
    assert [clients.get(request_id) for request_id in first] == [Client(ONE, 7, 0), Client(ONE, 7, 1)]
    assert clients.of_request(ONE, 7) == dict(enumerate(first))
    assert clients.of_front(ONE) == first
    assert clients.of_front(TWO) == second


def test_a_request_lives_until_its_last_sequence_has_ended_and_its_number_is_free_then() -> None:
    clients = Clients()
    first, second = clients.add(ONE, 7, 2)
    assert clients.drop(first) == Client(ONE, 7, 0)
    assert clients.of_request(ONE, 7) == {1: second}
    assert clients.drop(first) is None
    assert clients.drop(second) == Client(ONE, 7, 1)
    assert clients.of_request(ONE, 7) == {}
    (again,) = clients.add(ONE, 7, 1)
    assert again not in (first, second)


def test_what_has_ended_leaves_nothing_behind() -> None:
    clients = Clients()
    for number in range(100):
        for request_id in clients.add(ONE, number, 3):
            clients.drop(request_id)
    assert len(clients) == 0
    assert not clients._by_client
    assert clients.get(RequestId(5)) is None
