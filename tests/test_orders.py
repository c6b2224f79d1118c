# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head's look at its links between two steps."""

from __future__ import annotations

import pytest

from metrale_ray.baton import Baton
from metrale_ray.errors import LinkLost
from metrale_ray.orders import check_links
from metrale_ray.protocol.commands import Rank
from metrale_ray.protocol.link import HeadLink
from metrale_ray.protocol.transport import memory_pair


def test_a_worker_that_has_gone_is_named_once() -> None:
    ends = {rank: memory_pair(Baton(), "the head", f"rank {rank}") for rank in (1, 2)}
    links = [HeadLink(Rank(rank), head, 2, 1) for rank, (head, _) in ends.items()]
    check_links(links)
    ends[2][1].close()
    with pytest.raises(LinkLost, match=r"^rank 2 has closed the connection$") as caught:
        check_links(links)
    assert caught.value.rank == 2
