# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line: `metrale-ray` with its commands serve, generate, batch, chat, demo, inspect, doctor, bench,
cluster, and for journals inspect-journal, replay and bisect.

Rules: answers go to standard output, everything else to standard error. A failure is one line `error: ...`; with
`--log-level debug` a traceback goes before it. Exit codes: 0; 1 some request failed, the doctor found a problem, or a
replay differs; 2 the caller's mistake; 3 the engine could not start, or could not with this checkpoint; 4 it ended;
130 interrupted; 143 terminated.

What it leaves out: flags (`cli_flags`, `cli_parser`), prompts (`cli_prompts`), the conversation (`cli_chat`), the
service (`cli_serve`), batches (`cli_batch`), what `inspect` and `doctor` write (`cli_inspect`, `cli_doctor`),
configurations of clusters (`cli_cluster`), journals (`cli_journal`, `cli_inspect_journal`), and everything that the
driver does (`llm`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from metrale_ray import (
    cli_batch,
    cli_bench,
    cli_chat,
    cli_cluster,
    cli_doctor,
    cli_inspect,
    cli_inspect_journal,
    cli_journal,
    cli_serve,
)
from metrale_ray.cli_answers import AnswerWriter, tell_failed
from metrale_ray.cli_flags import DEFAULT_QUESTION, engine_config, request_options, sampling_params
from metrale_ray.cli_parser import make_parser
from metrale_ray.cli_prompts import Prompt, read_prompts
from metrale_ray.cli_token import use_ray_token
from metrale_ray.config import EngineConfig, warn_unknown_variables
from metrale_ray.errors import MetraleError, UserError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.termination import TERMINATED, was_terminated

if TYPE_CHECKING:
    from metrale_ray.llm import LLM

OpenLLM = Callable[[EngineConfig], "LLM"]
REQUEST_FAILED, ENGINE_FAILED, INTERRUPTED, READER_GONE = 1, 4, 130, 141
DEMO_MODEL = "demo"
DEMO_RANKS = 2
DEMO_MAX_TOKENS = 64  # a small model's answer to a question; more would be its ramblings


def main(
    argv: Sequence[str] | None = None,
    *,
    open_llm: OpenLLM | None = None,
    build_checkpoint: Callable[[], object] | None = None,
) -> int:
    """Run one command and give its exit code. The two functions stand in for the engine and the demo's checkpoint."""
    given: dict[str, Any] = {}
    answers = sys.stdout
    if isinstance(answers, io.TextIOWrapper):
        answers.reconfigure(errors="replace")  # a terminal without some character shows ? for it
    try:
        given = vars(make_parser().parse_args(argv))
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no answer
            match given["command"]:
                case "generate":
                    return generate(given, answers, open_llm or _open_llm)
                case "serve":
                    return cli_serve.serve(given, answers)
                case "chat":
                    return chat(given, answers, open_llm or _open_llm, build_checkpoint or _build_checkpoint)
                case "inspect":
                    return inspect(given, answers)
                case "doctor":
                    return doctor(given, answers)
                case "cluster":
                    return cli_cluster.cluster(given, answers)
                case "batch":
                    return cli_batch.batch(given, open_llm or _open_llm)
                case "replay" | "bisect" | "inspect-journal":
                    return journal(given, answers)
                case "bench":
                    return cli_bench.bench_serve(given, os.environ, answers)
                case _:
                    return demo(given, answers, open_llm or _open_llm, build_checkpoint or _build_checkpoint)
    except KeyboardInterrupt:
        print("terminated" if was_terminated() else "interrupted", file=sys.stderr)
        return TERMINATED if was_terminated() else INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except Exception as error:  # noqa: BLE001  the last place where a failure can become an exit code
        return _report(error, given)


def entry() -> NoReturn:
    """`main`, and the end of the process."""
    code = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (INTERRUPTED, TERMINATED):
        # Everything is closed. An interrupt in the middle of Ray's start leaves threads of Ray's that crash the
        # interpreter's own end.
        os._exit(code)
    sys.exit(code)


def generate(given: Mapping[str, Any], answers: TextIO, open_llm: OpenLLM) -> int:
    """Complete the prompts and write the answers in order, each as soon as it and all before it are there."""
    config = _configure(given)
    params, options = sampling_params(given), request_options(given)
    prompts = read_prompts(given)
    with open_llm(config) as llm:
        if given.get("chat"):
            prompts = [_chat_ids(llm, prompt) for prompt in prompts]
        writer = AnswerWriter(answers, as_json=bool(given.get("json")), has_text=llm.tokenizer is not None)
        # Answers that appear on the terminal are progress enough, and a bar would be in their way.
        for result in llm.generate_each(prompts, params, **options, progress=not answers.isatty()):
            writer.write(result)
    return REQUEST_FAILED if writer.num_failed else 0


def demo(given: Mapping[str, Any], answers: TextIO, open_llm: OpenLLM, build_checkpoint: Callable[[], object]) -> int:
    """Ask a small model one question and write the answer as it grows."""
    question = given.get("question", DEFAULT_QUESTION)
    config = _configure(given, model=DEMO_MODEL, ep_size=DEMO_RANKS)
    config = dataclasses.replace(config, model=str(build_checkpoint()))
    params = SamplingParams(temperature=0.0, max_tokens=DEMO_MAX_TOKENS)
    with open_llm(config) as llm:
        _write_header(config, llm.stats()["ranks"], question)
        last = None
        for last in llm.stream_chat([{"role": "user", "content": question}], params):
            answers.write(last.outputs[0].delta)
            answers.flush()
    answers.write("\n")
    answers.flush()
    return REQUEST_FAILED if last is not None and tell_failed(0, last) else 0


def chat(given: Mapping[str, Any], answers: TextIO, open_llm: OpenLLM, build_checkpoint: Callable[[], object]) -> int:
    """Answer what is typed, or what comes through a pipe, line by line. Without a model it is the demo's."""
    is_demo = engine_config(given, os.environ, model=DEMO_MODEL).model == DEMO_MODEL and not Path(DEMO_MODEL).exists()
    config = _configure(given, **({"model": DEMO_MODEL, "ep_size": DEMO_RANKS} if is_demo else {}))
    # A model as small as the demo's is at its best with its most likely words.
    params = sampling_params({**cli_chat.DEFAULTS, **({"temperature": 0.0} if is_demo else {}), **given})
    if is_demo:
        config = dataclasses.replace(config, model=str(build_checkpoint()))
    with open_llm(config) as llm:
        return cli_chat.converse(llm, params, given.get("system"), sys.stdin, answers)


def inspect(given: Mapping[str, Any], answers: TextIO) -> int:
    """Tell what a checkpoint is and what it takes."""
    # What is told does not depend on this machine's devices.
    config = dataclasses.replace(_configure(given), device="cpu")
    return cli_inspect.inspect(config, given.get("memory"), answers, as_json=bool(given.get("json")))


def doctor(given: Mapping[str, Any], answers: TextIO) -> int:
    """Check this machine, or the cluster at the address, and say what to do."""
    config = _configure(given, model="none")  # settings name a model; without the flag nothing opens it
    return cli_doctor.doctor(
        config.address,
        given.get("model"),
        config.revision,
        answers,
        timeout_s=given.get("timeout_s", cli_doctor.NODE_TIMEOUT_S),
        as_json=bool(given.get("json")),
    )


def journal(given: Mapping[str, Any], answers: TextIO) -> int:
    """Show a journal, run it again, or find where two runs part."""
    _configure({name: given[name] for name in ("log_level",) if name in given}, model="none")  # for its log lines
    match given["command"]:
        case "inspect-journal":
            return cli_inspect_journal.inspect_journal(given, answers)
        case "replay":
            return cli_journal.replay(given, answers)
        case _:
            return cli_journal.bisect(given, answers)


def _open_llm(config: EngineConfig) -> LLM:
    use_ray_token(config.address)
    from metrale_ray.llm import LLM

    return LLM(config)


def _build_checkpoint() -> object:
    from metrale_ray.demo import ensure_demo_checkpoint

    return ensure_demo_checkpoint()


def _configure(given: Mapping[str, Any], **defaults: Any) -> EngineConfig:
    config = engine_config(given, os.environ, **defaults)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("metrale_ray").setLevel(config.log_level.upper())
    warn_unknown_variables()
    return config


def _chat_ids(llm: LLM, prompt: Prompt) -> Prompt:
    if llm.tokenizer is None:
        raise UserError("--chat needs tokenizer files, and this checkpoint has none; give token ids instead")
    return llm.tokenizer.chat([{"role": "user", "content": prompt}])


def _write_header(config: EngineConfig, ranks: Sequence[Mapping[str, Any]], question: str) -> None:
    print(f"model {config.model}, {config.ep_size} ranks, protocol {config.resolved().ep_protocol}", file=sys.stderr)
    for rank in ranks:
        print(f"  rank {rank['rank']}: process {rank['pid']} on {rank['address']}", file=sys.stderr)
    print(f"question: {question}", file=sys.stderr)


def _report(error: Exception, given: Mapping[str, Any]) -> int:
    """Write one line for people, and give the exit code for programs."""
    if given.get("log_level") == "debug" or logging.getLogger("metrale_ray").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if isinstance(error, MetraleError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"error: {'; '.join(lines).replace(':; ', ': ')}", file=sys.stderr)
        # What no class has a code for came out of a running engine.
        return error.exit_code if error.exit_code != MetraleError.exit_code else ENGINE_FAILED
    print(f"error: unexpected {type(error).__name__}: {error}; --log-level debug shows where", file=sys.stderr)
    return ENGINE_FAILED


def _drop_output() -> None:
    """Let what is left in the buffer go nowhere, or Python complains once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
