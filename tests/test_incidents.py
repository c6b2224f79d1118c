# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where journals go, and what a rank keeps of its last commands when it ends badly."""

from __future__ import annotations

from pathlib import Path

import pytest

from metrale_ray.config import EngineConfig, FaultSpec
from metrale_ray.errors import ConfigError
from metrale_ray.incidents import incident_folders, keep_incident, open_journal_of
from metrale_ray.protocol.journal.reader import open_journal
from metrale_ray.protocol.journal.records import Answered, Closed, Commanded, Started
from tests.fixtures.succ import write_succ
from tests.test_head import GREEDY, running

CLOSED = Closed(5, "these are the last commands", "rank 1 has gone")


def test_incidents_lie_beside_the_journal_and_else_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path / "cache"))
    cache = tmp_path / "cache/incidents"
    of = [list(incident_folders(EngineConfig(model="m", journal="/j", journal_redact=r), 3)) for r in (False, True)]
    assert of == [[(Path("/j/incidents/rank-3"), redacted), (cache / "rank-3", True)] for redacted in (False, True)]
    assert list(incident_folders(EngineConfig(model="m"), 0)) == [(cache / "rank-0", True)]


def test_an_incident_is_written_and_its_place_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = keep_incident(EngineConfig(model="m", journal=str(tmp_path)), 2, [CLOSED])
    assert path is not None
    assert list(open_journal(path)) == [CLOSED]
    assert str(path) in caplog.text
    assert "rank 2" in caplog.text


def test_without_a_journal_no_prompt_comes_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path))
    path = keep_incident(EngineConfig(model="m"), 0, [Commanded(1, 1, 2, 4, (), b"the frame with the prompt")])
    assert path is not None
    assert b"prompt" not in path.read_bytes()


def test_a_folder_that_cannot_be_written_is_logged_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path / "file/cache"))
    (tmp_path / "file").write_text("")
    assert keep_incident(EngineConfig(model="m", journal=str(tmp_path / "file")), 0, [CLOSED]) is None
    assert caplog.text.count("could not be kept") == 2


def test_where_the_journals_folder_cannot_be_written_the_cache_folder_is_taken_without_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    config = EngineConfig(model="m", journal=str(tmp_path / "file"))
    path = keep_incident(config, 1, [Commanded(1, 1, 2, 4, (), b"the frame with the prompt")])
    assert path is not None
    assert path.parent == tmp_path / "cache/incidents/rank-1"
    assert b"prompt" not in path.read_bytes()


def test_a_user_without_a_home_is_logged_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("METRALE_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert keep_incident(EngineConfig(model="m"), 0, [CLOSED]) is None
    assert "METRALE_CACHE_DIR" in caplog.text


def test_folders_of_incidents_are_this_users_alone(tmp_path: Path) -> None:
    path = keep_incident(EngineConfig(model="m", journal=str(tmp_path)), 0, [CLOSED])
    assert path is not None
    modes = [each.stat().st_mode & 0o777 for each in (path.parent, path.parent.parent)]
    assert modes == [0o700, 0o700]


def test_a_journal_that_cannot_be_written_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        open_journal_of(EngineConfig(model="m", journal=str(tmp_path / "file")))
    assert not open_journal_of(EngineConfig(model="m")).is_on


def test_each_rank_of_an_engine_that_breaks_keeps_its_last_commands(tmp_path: Path) -> None:
    """Over real sockets; rank 1 differs from rank 0 at one command, and both keep that command."""
    model = write_succ(tmp_path / "model")
    journal = tmp_path / "journal"
    fault = FaultSpec(rank=1, phase="reply", kind="diverge", command=4)
    with running(model, faults=(fault,), journal=str(journal)) as (process, client):
        client.submit([5], GREEDY)
        assert process.wait_ended() is not None
    (head,) = (journal / "incidents/rank-0").iterdir()
    (worker,) = (journal / "incidents/rank-1").iterdir()
    of_head, of_worker = list(open_journal(head)), list(open_journal(worker))
    assert isinstance(of_head[0], Started)
    assert isinstance(of_worker[0], Started)
    assert (len(of_worker[0].ranks), of_worker[0].ranks[0], of_worker[0].num_blocks) == (2, {}, of_head[0].num_blocks)
    assert of_worker[0].ranks[1] == of_head[0].ranks[1]
    assert abs(of_worker[0].wall_time_s - of_head[0].wall_time_s) < of_head[-1].at_us * 1e-6
    for records, rank, error in ((of_head, 0, "desync (rank 1, digest)"), (of_worker, 1, "link_lost (rank 0)")):
        assert isinstance(records[-1], Closed)
        assert records[-1].reason == f"the last commands of rank {rank}, ended by {error}"
        times = [record.at_us for record in records if isinstance(record, Commanded | Answered | Closed)]
        assert times == sorted(set(times))
    sent = [record for record in of_head if isinstance(record, Commanded)]
    received = [record for record in of_worker if isinstance(record, Commanded)]
    assert [record.data for record in sent] == [record.data for record in received]
    last = [record for record in of_head if isinstance(record, Answered)][-1]
    assert (last.kind, last.rank) == ("desync", 1)
    (life,) = [path for path in journal.iterdir() if path.name != "incidents"]
    written = list(open_journal(life))
    assert isinstance(written[-1], Closed)
    assert written[-1].failure == last.message
