# SPDX-License-Identifier: MIT OR Apache-2.0
"""`bisect_configurations`: one journal under two configurations side by side, up to the first command at which their
logits differ by more than a tolerance.

Rules: both get the recorded commands, with the recorded tokens, so a difference does not feed on what was chosen
because of an earlier one. All of rank 0's logits are compared, not only those that give a token.

What is left out: whether either of the two is as recorded (`replaying`), and two journals (`journal_bisecting`).
"""

from __future__ import annotations

from collections.abc import Iterable

from metrale_ray.config import EngineConfig
from metrale_ray.protocol.commands import Logits, Span, Status, command_rows
from metrale_ray.protocol.journal.records import Commanded, Gap, ReadRecord
from metrale_ray.replay.parting import BisectResult, Parting, logit_gaps
from metrale_ray.replay.player import Played, Player
from metrale_ray.replay.ranks import ReplayRanks
from metrale_ray.replay.replaying import OnProgress, open_ranks, started_of


def bisect_configurations(
    records: Iterable[ReadRecord],
    a: EngineConfig,
    b: EngineConfig,
    tolerance: float,
    *,
    any_checkpoint: bool = False,
    on_progress: OnProgress | None = None,
) -> BisectResult:
    """Run `records` under `a` and `b` (see `replay_config`). Both models are in memory at once.

    `records` is read twice. Raises what `replay_journal` raises.
    """
    started = started_of(records)
    sides = [open_ranks(started, config, any_checkpoint=any_checkpoint, on_progress=on_progress) for config in (a, b)]
    players = [Player(ranks) for ranks in sides]
    total = sum(isinstance(record, Commanded) for record in records)
    result = BisectResult(tolerance)
    for record in records:
        played_a, played_b = (player.take(record) for player in players)
        if isinstance(record, Gap):
            result.remarks.append("records are missing; what follows is compared from the next snapshot on")
        if played_a is None or played_b is None:
            continue
        result.num_commands += 1
        result.parting = _parting(played_a, played_b, sides, result)
        if result.parting is not None:
            break
        if on_progress is not None:
            on_progress("replaying", result.num_commands, total)
    return result


def _parting(a: Played, b: Played, sides: list[ReplayRanks], result: BisectResult) -> Parting | None:
    ends_a, ends_b = _outcome(a), _outcome(b)
    if ends_a != ends_b:
        return _make(a, "the outcome", None, ends_a, ends_b)
    logits_a, logits_b = sides[0].logits, sides[1].logits
    if logits_a is None or logits_b is None or not logits_a.shape[0]:
        return None
    gaps_RV = logit_gaps(logits_a, logits_b)
    row, token_id = divmod(int(gaps_RV.argmax()), gaps_RV.shape[1])
    gap = float(gaps_RV[row, token_id])
    if not result.note_gap(a.commanded.seq, gap, gaps_RV.numel()):
        return None
    request_id, position = _places(a)[row]
    values = (f"{float(logits_RV[row, token_id]):.9g}" for logits_RV in (logits_a, logits_b))
    return _make(a, f"the logit of token {token_id} behind position {position}, by {gap:.3g}", request_id, *values)


def _outcome(played: Played) -> str:
    """How the command ended on these ranks, in words."""
    for reply in played.replies:
        if reply.status is not Status.OK:
            reason = "no reason given" if reply.error is None else reply.error.message
            return f"{reply.status.name.lower()}: {reason}"
    return "ok"


def _places(played: Played) -> list[tuple[int, int]]:
    """Of each row of logits the request and the position that it is behind."""
    notes, spans = played.commanded.rows, command_rows(played.frame.command)
    return [
        (note.request_id, position) for note, span in zip(notes, spans, strict=True) for position in _positions(span)
    ]


def _positions(span: Span) -> range:
    if span.logits is Logits.ALL:
        return range(span.start, span.end)
    return range(span.end - 1, span.end) if span.logits is Logits.LAST else range(0)


def _make(played: Played, name: str, request_id: int | None, a: str, b: str) -> Parting:
    return Parting(played.commanded.seq, played.commanded.cmd, name, request_id, a, b)
