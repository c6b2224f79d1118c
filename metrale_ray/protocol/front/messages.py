# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a front and the head say to each other, as plain frozen values, and the numbers that both sides keep to.

Only tokens and numbers are said, no text but the reasons of errors and the head's figures. A request may have n
sequences, which are numbered from 0 and each end by themselves.

What it leaves out: their bytes (`frames`), and which of them are legal when (`server`, `client`).
"""

from __future__ import annotations

from dataclasses import dataclass

from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import FinishReason

FRONT_VERSION = 3

BEAT_S = 2.0
SILENCE_S = 10.0
"""Five beats: one that is late because of a long pause in the other process does not end a session."""

MAX_TIMEOUT_S = 30 * 24 * 3600.0
"""A month. Whoever means for ever gives no timeout."""

MAX_DOCUMENT_CHARS = 2**18
"""The head's figures as text: thousands of experts and ranks fit."""


@dataclass(frozen=True, slots=True)
class Open:
    """A front's first message."""

    version: int = FRONT_VERSION


@dataclass(frozen=True, slots=True)
class Submit:
    """One request. `request_id` (u64) is the front's choice, and unique among the requests of that front.

    `priority` (i32): lower goes first. `timeout_s`, above 0 and at most MAX_TIMEOUT_S: how long the request may take
    from its arrival at the head; None: as long as it takes.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: TokenParams
    priority: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request any more: all its sequences end. One that the head does not know has ended."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A stop string ended the text of one sequence: end it with the reason "stop". The others go on."""

    request_id: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """The front has taken `num_frames` Outputs frames so far in this session."""

    num_frames: int


@dataclass(frozen=True, slots=True)
class Beat:
    """This side is alive. Said both ways."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The front leaves; what is still running for it is aborted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """How is the engine? `number` (u64) grows with each question of a session."""

    number: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What a front needs to know of the engine. `engine_epoch` is the group's life at the moment of the answer."""

    max_model_len: int
    vocab_size: int
    engine_epoch: int


@dataclass(frozen=True, slots=True)
class Output:
    """What one step did for one sequence of a request: new tokens, an end, or both.

    `index` is the sequence within the request. `finish_reason` None means that more comes. `stop_token_id` is the
    token that ended the sequence, only with "stop"; `error` is (code, message), exactly with "error".

    `logprobs` is empty, or one per token of `token_ids`. `prompt_logprobs` come with index 0, in order of positions 1,
    2, ..., some with each step that computes a part of the prompt, and the last ones no later than the first token.

    `is_refusal`: the request was not taken, and none of its sequences gets anything else; with index 0 and an error.
    """

    request_id: int
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: tuple[str, str] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs for one front, in order: of one step, or of whatever came together while the front was not reading.

    An answer to what the front said, and several steps, may share a frame; one step may take several. `number` grows
    by one per frame of a session, from 1.
    """

    number: int
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to question `number` and to all before it: the head's figures, as the text of one JSON object.

    `document` has at most MAX_DOCUMENT_CHARS characters. It waits for no outputs and takes none of their room.
    """

    number: int
    document: str


@dataclass(frozen=True, slots=True)
class Dead:
    """No answer comes on this session any more. `rank` is the one at fault, where one is."""

    reason: str
    rank: int | None = None


FromFront = Open | Submit | Abort | Finish | Read | Beat | Bye | Ask
FromHead = Opened | Outputs | Beat | Dead | Told
