# SPDX-License-Identifier: MIT OR Apache-2.0
"""A whole head with two fronts of which one stops reading: its request is aborted and the other one's goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient
from metrale_ray.protocol.front.server import FrontServer
from metrale_ray.protocol.keys import new_keys
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE
from tests.protocol.tcp_proxy import proxy_to
from tests.test_head import LONG, TIMEOUT_S, running, tokens_of, until

CREDIT = 64  # frames; less than a head gives, so that they are soon used up


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_succ(tmp_path_factory.mktemp("succ"))


def test_the_requests_of_a_front_that_stops_reading_are_aborted_while_anothers_go_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FrontServer.__init__.__kwdefaults__, "credit", CREDIT)
    monkeypatch.setitem(FrontServer.__init__.__kwdefaults__, "max_held_bytes", 100 * CREDIT)
    with running(model, ep_size=1) as (process, other), proxy_to(process.head.front_address) as proxy:
        keys = new_keys()
        process.allow(keys.public)
        with FrontClient(proxy.address, keys, process.head.public_key) as stalled:
            stalled.wait_opened(TIMEOUT_S)
            mine, its = other.submit([7], LONG), stalled.submit([9], LONG)
            its.get(TIMEOUT_S)
            until(lambda: process.call(process.head.stats())["running"] == 2)
            proxy.answers.limit(1, "stall")
            tokens: list[int] = []
            while process.call(process.head.stats())["running"] == 2:
                tokens += mine.get(TIMEOUT_S).token_ids  # comes although the stalled one reads nothing
            assert len(tokens) >= CREDIT - 1
            for _ in range(2 * CREDIT):  # and on, beyond its own credit, which it gives back by reading
                tokens += mine.get(TIMEOUT_S).token_ids
            assert tokens == [(8 + n) % VOCAB_SIZE for n in range(len(tokens))]
            mine.abort()
            until(lambda: process.call(process.head.stats())["running"] == 0)
            stats = process.call(process.head.stats())
            assert stats["free_blocks"] == stats["total_blocks"]
            proxy.close()
            with pytest.raises(EngineDead, match="the head at"):
                tokens_of(its)
