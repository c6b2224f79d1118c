# SPDX-License-Identifier: MIT OR Apache-2.0
"""`replay_journal`: a journal run again, command by command, up to its end or to the first difference.

Rules: the ranks get the recorded frames, and rank 0's logits give tokens as the head made them. A command that
failed when it was recorded is run all the same and settled as the record says: what broke it (a full device, a lost
peer, a fault raised on purpose) is not in the journal. Records that are missing are told and passed over, up to the
next snapshot.

What is left out: how ranks, requests and comparisons work (`ranks`, `requests`, `comparison`), and the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError, JournalError
from metrale_ray.protocol.commands import Status, command_rows
from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Ended,
    Gap,
    ReadRecord,
    Sampled,
    Snapshot,
    Started,
    TokenNote,
)
from metrale_ray.readout import Readout
from metrale_ray.replay.comparison import Comparison, Difference
from metrale_ray.replay.player import Played, Player
from metrale_ray.replay.ranks import ReplayRanks
from metrale_ray.replay.requests import RecordedRequests, requests_of
from metrale_ray.replay.settings import file_differences, kernel_differences, recorded_threads

# An error that time decides: it says nothing of whether the same logits give the same tokens.
_OF_TIME = ("grammar_failed",)
_ENDS = {"lost": "a rank lost", "desync": "the ranks no longer in step"}

Phase = Literal["loading", "replaying"]
OnProgress = Callable[[Phase, int, int], None]
"""Called with the phase, what is done and what there is: bytes while loading, commands while replaying."""


@dataclass(slots=True)
class ReplayResult:
    """What came of it. `difference` is None when everything is as recorded.

    `kernel_differences`: what decides the last bits and is another one here; when there is none, and no slot stood on
    a snapshot, `num_exact_values` of the noted logits were compared to the last bit. `largest_gap` is the largest
    difference among all `num_values` of them. `remarks` are for people: gaps, an end in the middle, a failed life.
    """

    num_commands: int = 0
    num_tokens: int = 0
    num_requests: int = 0
    num_failed: int = 0  # commands that did not succeed when they were recorded
    num_failed_again: int = 0  # of these
    num_values: int = 0
    num_exact_values: int = 0
    largest_gap: float = 0.0
    kernel_differences: tuple[str, ...] = ()
    file_differences: tuple[str, ...] = ()
    difference: Difference | None = None
    remarks: list[str] = field(default_factory=list)


def started_of(records: Iterable[ReadRecord]) -> Started:
    """How the engine of this journal started. Raises JournalError where neither a start nor a snapshot says so."""
    for record in records:
        match record:
            case Started():
                return record
            case Snapshot():
                return record.started
            case Commanded():
                break
    raise JournalError("this journal begins with neither the start of an engine nor a snapshot")


def replay_journal(
    records: Iterable[ReadRecord],
    config: EngineConfig,
    *,
    any_checkpoint: bool = False,
    on_progress: OnProgress | None = None,
) -> ReplayResult:
    """Run `records` again with the ranks of `config` (see `replay_config`), up to the first difference.

    `records` is read twice: a list, or a JournalReader. From now on this process computes with as many threads as each
    recorded rank did. Raises JournalError for a journal that cannot be run, ConfigError where the checkpoint is another
    one and `any_checkpoint` does not allow that, and what building ranks raises.
    """
    started = started_of(records)
    ranks = open_ranks(started, config, any_checkpoint=any_checkpoint, on_progress=on_progress)
    kernels = kernel_differences(started.must_equal, ranks.must_equal)
    files = file_differences(started.must_equal, ranks.must_equal)
    total, given_up = _survey(records)
    comparison = Comparison(ranks.vocab_size, given_up, has_same_kernels=not kernels and not files)
    replay = _Replay(Player(ranks), requests_of(started.eos_token_ids, ranks), comparison, ranks)
    replay.result.kernel_differences, replay.result.file_differences = kernels, files
    for record in records:
        replay.take(record)
        if replay.result.difference is not None:
            break
        if on_progress is not None and isinstance(record, Answered):
            on_progress("replaying", replay.result.num_commands, total)
    return replay.finish()


def open_ranks(
    started: Started, config: EngineConfig, *, any_checkpoint: bool, on_progress: OnProgress | None
) -> ReplayRanks:
    """The ranks of `config`, not loaded yet. Raises ConfigError where the checkpoint is not the recorded one."""

    def on_load(done_bytes: int, total_bytes: int) -> None:
        if on_progress is not None:
            on_progress("loading", done_bytes, total_bytes)

    ranks = ReplayRanks(config, num_threads=recorded_threads(started), on_load=on_load)
    different = file_differences(started.must_equal, ranks.must_equal)
    if different and not any_checkpoint:
        raise ConfigError(
            f"the checkpoint in {config.model} is not the one of this journal: {'; '.join(different)}. Name the "
            "recorded one with --model, or allow another one with --any-checkpoint."
        )
    return ranks


def _survey(records: Iterable[ReadRecord]) -> tuple[int, frozenset[int]]:
    """The number of commands, and the requests that were given up for an error that time decides."""
    num_commands, given_up = 0, set()
    for record in records:
        if isinstance(record, Commanded):
            num_commands += 1
        elif isinstance(record, Ended) and record.code in _OF_TIME:
            given_up.add(record.request_id)
    return num_commands, frozenset(given_up)


class _Replay:
    """The state between two records."""

    def __init__(self, player: Player, requests: RecordedRequests, comparison: Comparison, ranks: ReplayRanks) -> None:
        self.result = ReplayResult()
        self._player = player
        self._requests = requests
        self._comparison = comparison
        self._ranks = ranks
        self._open: tuple[Played, Readout] | None = None  # a step whose tokens have not been compared
        self._is_closed = False

    def take(self, record: ReadRecord) -> None:
        match record:
            case Admitted() if not self._player.is_lost:
                self._requests.admit(record)
                self.result.num_requests += len(record.request_ids)
            case Ended(_, request_id):
                self._requests.end(request_id)
            case Sampled(_, seq, tokens) if self._open is not None and self._open[0].commanded.seq == seq:
                self._compare(tokens)
            case Commanded():
                self._compare(())  # where there were tokens, they have been compared
                self._requests.go_on()
            case Gap():
                self._pass_over(record)
            case Snapshot() if self._player.takes_up:
                self._take_up(record)
            case Closed():
                self._close(record)
        if self.result.difference is None:
            self._note(self._player.take(record))

    def finish(self) -> ReplayResult:
        """The records have ended, or there is a difference."""
        result, comparison = self.result, self._comparison
        if result.difference is None:
            self._tell_end()
        if self._player.num_skipped:
            result.remarks.append(f"{self._player.num_skipped} commands behind a gap could not be run")
        if comparison.num_near_ties:
            result.remarks.append(
                f"{comparison.num_near_ties} of the tokens would have been others here, whose logits are within "
                "rounding of the recorded ones"
            )
        result.num_values, result.num_exact_values = comparison.num_values, comparison.num_exact_values
        result.largest_gap = comparison.largest_gap
        return result

    def _note(self, played: Played | None) -> None:
        if played is None or played.answered is None:
            return
        result, answered = self.result, played.answered
        result.num_commands += 1
        result.difference = self._comparison.of_answers(played)
        if answered.kind != "ok":
            self._note_failed(answered, played)
        elif played.commanded.rows and result.difference is None:
            rows = command_rows(played.frame.command)
            self._open = played, self._requests.read_out(self._ranks.logits, played.commanded.rows, rows)

    def _note_failed(self, answered: Answered, played: Played) -> None:
        self.result.num_failed += 1
        self.result.num_failed_again += any(reply.status is not Status.OK for reply in played.replies)
        if answered.kind in ("lost", "desync"):
            self.result.remarks.append(
                f"the recorded engine ended at command {answered.seq}, {_ENDS[answered.kind]}: {answered.message}"
            )

    def _compare(self, tokens: tuple[TokenNote, ...]) -> None:
        if self._open is not None:
            played, readout = self._open
            self._open = None
            self.result.num_tokens += len(tokens)
            self.result.difference = self._comparison.of_tokens(played, readout, self._ranks.logits, tokens)
            self._requests.keep(tokens)

    def _pass_over(self, gap: Gap) -> None:
        self._open = None
        number = f"{gap.num_records} records" if gap.num_records else "records, nobody knows how many,"
        self.result.remarks.append(f"{number} are missing behind command {self._player.last_seq}")

    def _take_up(self, snapshot: Snapshot) -> None:
        self._requests.resume(snapshot.admitted, snapshot.live)
        self.result.remarks.append(f"taken up at the snapshot behind command {snapshot.seq}")

    def _close(self, closed: Closed) -> None:
        self._is_closed = True
        if closed.failure is not None:
            self._open = None  # what broke it may have come before its tokens were noted
            self.result.remarks.append(f"the recorded engine ended with: {closed.failure}")
        self._compare(())

    def _tell_end(self) -> None:
        played = self._player.finish()
        if played is not None:
            failed = [reply for reply in played.replies if reply.status is not Status.OK]
            told = f"rank {failed[0].rank} failed: {failed[0].error}" if failed else "every rank carried it out here"
            self.result.remarks.append(f"the journal ends inside command {played.commanded.seq}; {told}")
        elif not self._is_closed:
            self.result.remarks.append("the journal has no end: its engine was killed, or still runs")
