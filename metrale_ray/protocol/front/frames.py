# SPDX-License-Identifier: MIT OR Apache-2.0
"""The one frame that each message of a front's session is.

Rules: one msgpack map per frame, `type` says which message; every field is checked before it is packed and after it
is unpacked. Whatever is wrong raises FrameError.

What is left out: the maps of TokenParams (`params_map`) and of log probabilities (`logprobs_map`) inside a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, cast, get_args

from metrale_ray.errors import FrameError
from metrale_ray.protocol.fields import (
    Fields,
    check_i32,
    check_text,
    check_u32,
    check_u64,
    cut_text,
    pack_frame,
    pack_u32s,
    unpack_frame,
)
from metrale_ray.protocol.front.logprobs_map import logprobs_to_map, read_logprobs
from metrale_ray.protocol.front.messages import (
    MAX_DOCUMENT_CHARS,
    MAX_TIMEOUT_S,
    Abort,
    Ask,
    Beat,
    Bye,
    Dead,
    Finish,
    FromFront,
    FromHead,
    Open,
    Opened,
    Output,
    Outputs,
    Read,
    Submit,
    Told,
)
from metrale_ray.protocol.front.params_map import PackedParams, ParamsReader, read_params
from metrale_ray.protocol.limits import MAX_CODE_CHARS, MAX_ERROR_CHARS, MAX_TOKENS
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import FinishReason

MAX_PROMPT_TOKENS = MAX_TOKENS
"""Tokens of one prompt: what one frame holds, and longer than any context."""

MAX_OUTPUTS = 512
"""Outputs of one frame: even if each carries the longest error text, the frame's own bound holds."""

MAX_OUTPUT_TOKENS = 1024
"""Tokens of one output: a step gives a sequence one, or as many as a verify accepts."""

MAX_OUTPUT_LOGPROBS = 64
"""Log probabilities of one output, and as many of its prompt: what one step gives. With 20 candidates each, and those
of MAX_OUTPUTS outputs, the frame's own bound is the tighter one."""

_BAD_TIMEOUT = f"timeout_s must be a number above 0 and at most {MAX_TIMEOUT_S:g}"

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


class FrontCode(IntEnum):
    """Message codes on the wire (u32). A code is never reused for another meaning."""

    OPEN = 1
    SUBMIT = 2
    ABORT = 3
    FINISH = 4
    READ = 5
    BEAT = 6
    BYE = 7
    OPENED = 8
    OUTPUTS = 9
    DEAD = 10
    ASK = 11
    TOLD = 12


def encode(message: FromFront | FromHead) -> bytes:
    """The one frame of `message`. Raises FrameError for a value that no reader would accept."""
    if isinstance(message, Submit):
        return encode_submit(message, PackedParams(message.params))
    code, fields = _to_wire(message)
    return pack_frame({"type": int(code), **fields})


def encode_submit(submit: Submit, params: PackedParams) -> bytes:
    """As `encode`, of a request whose parameters have been packed before."""
    return pack_frame({"type": int(FrontCode.SUBMIT), **_submit_to_wire(submit)}, {"params": params.packed})


def decode_from_front(data: bytes) -> FromFront:
    """The message that a front sent. Raises FrameError."""
    return cast(FromFront, _decode(data, _FROM_FRONT))


class FrontDecoder:
    """`decode_from_front` for all that comes to one head: parameters that come again at once are the same object."""

    def __init__(self) -> None:
        params = ParamsReader()
        self._table = {**_FROM_FRONT, FrontCode.SUBMIT: lambda fields: _read_submit(fields, params.read)}

    def decode(self, data: bytes) -> FromFront:
        """The message that a front sent. Raises FrameError."""
        return cast(FromFront, _decode(data, self._table))


def decode_from_head(data: bytes) -> FromHead:
    """The message that the head sent. Raises FrameError."""
    return cast(FromHead, _decode(data, _FROM_HEAD))


def _to_wire(message: Open | Abort | Finish | Read | Beat | Bye | Ask | FromHead) -> tuple[FrontCode, dict[str, Any]]:
    match message:
        case Open(version):
            return FrontCode.OPEN, {"version": check_u32("version", version)}
        case Abort(request_id):
            return FrontCode.ABORT, {"request_id": check_u64("request_id", request_id)}
        case Finish(request_id, index):
            fields = {"request_id": check_u64("request_id", request_id), "index": check_u32("index", index)}
            return FrontCode.FINISH, fields
        case Read(num_frames):
            return FrontCode.READ, {"num_frames": check_u64("num_frames", num_frames)}
        case Beat():
            return FrontCode.BEAT, {}
        case Bye():
            return FrontCode.BYE, {}
        case Opened():
            return FrontCode.OPENED, _opened_to_wire(message)
        case Outputs(number, outputs):
            return FrontCode.OUTPUTS, {"number": check_u64("number", number), "outputs": _outputs_to_wire(outputs)}
        case Dead(reason, rank):
            return FrontCode.DEAD, {"reason": cut_text(reason, MAX_ERROR_CHARS), "rank": _or_none("rank", rank)}
        case Ask(number):
            return FrontCode.ASK, {"number": check_u64("number", number)}
        case Told(number, document):
            text = check_text("document", document, MAX_DOCUMENT_CHARS)
            return FrontCode.TOLD, {"number": check_u64("number", number), "document": text}


def _submit_to_wire(submit: Submit) -> dict[str, Any]:
    """All but the parameters, for which there is a place."""
    return {
        "request_id": check_u64("request_id", submit.request_id),
        "prompt_token_ids": pack_u32s("prompt_token_ids", submit.prompt_token_ids, MAX_PROMPT_TOKENS),
        "params": None,
        "priority": check_i32("priority", submit.priority),
        "timeout_s": None if submit.timeout_s is None else _checked_timeout(submit.timeout_s),
    }


def _checked_timeout(timeout_s: float) -> float:
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise FrameError(_BAD_TIMEOUT)
    return float(timeout_s)


def _opened_to_wire(opened: Opened) -> dict[str, Any]:
    return {
        "max_model_len": check_u32("max_model_len", opened.max_model_len),
        "vocab_size": check_u32("vocab_size", opened.vocab_size),
        "engine_epoch": check_u64("engine_epoch", opened.engine_epoch),
    }


def _outputs_to_wire(outputs: Sequence[Output]) -> list[dict[str, Any]]:
    if len(outputs) > MAX_OUTPUTS:
        raise FrameError(f"a frame has at most {MAX_OUTPUTS} outputs, not {len(outputs)}")
    return [_output_to_wire(output) for output in outputs]


def _output_to_wire(output: Output) -> dict[str, Any]:
    problem = _output_problem(output)
    if problem:
        raise FrameError(problem)
    wire: dict[str, Any] = {
        "request_id": check_u64("request_id", output.request_id),
        "index": check_u32("index", output.index),
        "token_ids": pack_u32s("token_ids", output.token_ids, MAX_OUTPUT_TOKENS),
    }
    if output.finish_reason is not None:  # most outputs have none, and then nothing more is on the wire
        wire["finish_reason"] = output.finish_reason
        wire["stop_token_id"] = _or_none("stop_token_id", output.stop_token_id)
        wire["error"] = None if output.error is None else _error_to_wire(*output.error)
        wire["is_refusal"] = output.is_refusal
    if output.logprobs:
        wire["logprobs"] = logprobs_to_map(output.logprobs, MAX_OUTPUT_LOGPROBS)
    if output.prompt_logprobs:
        wire["prompt_logprobs"] = logprobs_to_map(output.prompt_logprobs, MAX_OUTPUT_LOGPROBS)
    return wire


def _error_to_wire(code: str, message: str) -> dict[str, str]:
    return {"code": check_text("code", code, MAX_CODE_CHARS), "message": cut_text(message, MAX_ERROR_CHARS)}


def _or_none(name: str, value: int | None) -> int | None:
    return None if value is None else check_u32(name, value)


def _output_problem(output: Output) -> str | None:
    if output.finish_reason is not None and output.finish_reason not in FINISH_REASONS:
        return f"finish_reason must be one of {', '.join(FINISH_REASONS)}"
    if (output.error is not None) != (output.finish_reason == "error"):
        return 'an output has an error exactly when its finish_reason is "error"'
    if output.stop_token_id is not None and output.finish_reason != "stop":
        return 'an output has a stop_token_id only when its finish_reason is "stop"'
    if output.is_refusal and (output.error is None or output.index != 0):
        return "a refusal has an error and the index 0"
    if output.logprobs and len(output.logprobs) != len(output.token_ids):
        return f"an output of {len(output.token_ids)} tokens cannot have {len(output.logprobs)} logprobs"
    if output.prompt_logprobs and output.index != 0:
        return "prompt_logprobs come with the index 0"
    return None


def _decode(data: bytes, table: dict[int, Callable[[Fields], Any]]) -> Any:
    fields = unpack_frame(data)
    code = fields.u32("type")
    reader = table.get(code)
    if reader is None:
        raise fields.error(f"type {code} is no message that this side may send")
    return reader(fields)


def _read_submit(fields: Fields, read: Callable[[Fields], TokenParams] = read_params) -> Submit:
    prompt = fields.u32s("prompt_token_ids", MAX_PROMPT_TOKENS)
    return Submit(
        fields.u64("request_id"),
        prompt,
        read(fields.fields("params")),
        fields.i32("priority"),
        None if fields.is_absent("timeout_s") else _read_timeout(fields),
    )


def _read_timeout(fields: Fields) -> float:
    timeout_s = fields.number("timeout_s")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise fields.error(_BAD_TIMEOUT)
    return timeout_s


def _read_opened(fields: Fields) -> Opened:
    return Opened(fields.u32("max_model_len"), fields.u32("vocab_size"), fields.u64("engine_epoch"))


def _read_outputs(fields: Fields) -> Outputs:
    outputs = tuple(_read_output(each) for each in fields.fields_list("outputs", MAX_OUTPUTS))
    return Outputs(fields.u64("number"), outputs)


def _read_output(fields: Fields) -> Output:
    reason = None if fields.is_absent("finish_reason") else fields.text("finish_reason", MAX_CODE_CHARS)
    output = Output(
        fields.u64("request_id"),
        fields.u32("index"),
        fields.u32s("token_ids", MAX_OUTPUT_TOKENS),
        cast("FinishReason | None", reason),
        None if fields.is_absent("stop_token_id") else fields.u32("stop_token_id"),
        None if fields.is_absent("error") else _read_error(fields.fields("error")),
        _read_logprobs(fields, "logprobs"),
        _read_logprobs(fields, "prompt_logprobs"),
        not fields.is_absent("is_refusal") and fields.flag("is_refusal"),
    )
    problem = _output_problem(output)
    if problem:
        raise fields.error(problem)
    return output


def _read_logprobs(fields: Fields, key: str) -> tuple[TokenLogprobs, ...]:
    return () if fields.is_absent(key) else read_logprobs(fields.fields(key), MAX_OUTPUT_LOGPROBS)


def _read_error(fields: Fields) -> tuple[str, str]:
    return fields.text("code", MAX_CODE_CHARS), fields.text("message", MAX_ERROR_CHARS)


def _read_dead(fields: Fields) -> Dead:
    return Dead(fields.text("reason", MAX_ERROR_CHARS), None if fields.is_absent("rank") else fields.u32("rank"))


def _read_beat(fields: Fields) -> Beat:
    return Beat()


_FROM_FRONT: dict[int, Callable[[Fields], FromFront]] = {
    FrontCode.OPEN: lambda fields: Open(fields.u32("version")),
    FrontCode.SUBMIT: _read_submit,
    FrontCode.ABORT: lambda fields: Abort(fields.u64("request_id")),
    FrontCode.FINISH: lambda fields: Finish(fields.u64("request_id"), fields.u32("index")),
    FrontCode.READ: lambda fields: Read(fields.u64("num_frames")),
    FrontCode.BEAT: _read_beat,
    FrontCode.BYE: lambda fields: Bye(),
    FrontCode.ASK: lambda fields: Ask(fields.u64("number")),
}
_FROM_HEAD: dict[int, Callable[[Fields], FromHead]] = {
    FrontCode.OPENED: _read_opened,
    FrontCode.OUTPUTS: _read_outputs,
    FrontCode.BEAT: _read_beat,
    FrontCode.DEAD: _read_dead,
    FrontCode.TOLD: lambda fields: Told(fields.u64("number"), fields.text("document", MAX_DOCUMENT_CHARS)),
}
