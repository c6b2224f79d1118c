# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the head makes of workers that have gone, or answer out of turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from metrale_ray.baton import Baton
from metrale_ray.errors import Desync, LinkLost
from metrale_ray.orders import check_links
from metrale_ray.protocol.codec import encode_reply
from metrale_ray.protocol.commands import Cmd, Rank, Reply
from metrale_ray.protocol.link import HeadLink, WorkerLink
from metrale_ray.protocol.transport import memory_pair
from tests.fixtures.succ import write_succ
from tests.harness import Driver, run_engine


def test_a_worker_that_has_gone_is_named_once() -> None:
    ends = {rank: memory_pair(Baton(), "the head", f"rank {rank}") for rank in (1, 2)}
    links = [HeadLink(Rank(rank), head, 2, 1) for rank, (head, _) in ends.items()]
    check_links(links)
    ends[2][1].close()
    with pytest.raises(LinkLost, match=r"^rank 2 has closed the connection$") as caught:
        check_links(links)
    assert caught.value.rank == 2


def test_a_reply_that_comes_twice_is_a_desync_that_names_its_rank_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, counts = WorkerLink.reply, []

    def twice(link: WorkerLink, answer: Reply) -> None:
        reply(link, answer)
        if (link.rank, answer.seq) == (2, 3):
            link._send(encode_reply(answer))

    def script(driver: Driver) -> None:
        driver.submit([20])
        try:
            driver.run()
        finally:
            counts.append(driver.engine.counters.of_command(Cmd.DECODE).by_status["desync"])

    monkeypatch.setattr(WorkerLink, "reply", twice)
    error = run_engine(write_succ(tmp_path), script, ep_size=3).head_error
    assert isinstance(error, Desync)
    assert (error.rank, error.seq, counts) == (2, 4, [1])
    assert error.message == "rank 2 answered with seq 3 instead of 4 to command 4 (DECODE)"
