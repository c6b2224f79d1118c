# SPDX-License-Identifier: MIT OR Apache-2.0
"""The parser of the command line: which command has which flags."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NoReturn

import metrale_ray
from metrale_ray import cli_bench_flags as bench_flags
from metrale_ray import cli_cluster_flags as cluster_flags
from metrale_ray import cli_journal_flags as journal_flags
from metrale_ray.cli_batch import BATCH_FLAGS, BATCH_LIMIT_FLAGS, STRICTNESS_FLAGS
from metrale_ray.cli_flags import (
    CONFIG_FLAG,
    DEMO_ENGINE_SETTINGS,
    DOCTOR_ENGINE_SETTINGS,
    ENGINE_FLAGS,
    INSPECT_ENGINE_SETTINGS,
    JSON_FLAG,
    MEMORY_FLAG,
    NODE_TIMEOUT_FLAG,
    NOT_IN_CHAT,
    OBJECT_FLAG,
    PROMPT_FLAGS,
    QUESTION_FLAG,
    REQUEST_DEFAULTS,
    REQUEST_FLAGS,
    SAMPLING_FLAGS,
    SYSTEM_FLAG,
    Flag,
    engine_defaults,
    sampling_defaults,
    with_default,
)
from metrale_ray.cli_serve import LIMIT_FLAGS, MODEL_FLAGS, SERVICE_FLAGS, service_defaults
from metrale_ray.cli_wait import WAIT_FLAGS
from metrale_ray.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would exit; flags are never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """A mistake on the command line."""
        raise UserError(f"{message}; see {self.prog} --help")


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(prog="metrale-ray", description="Expert-parallel serving of mixture-of-experts models on Ray.")
    parser.add_argument("--version", action="version", version=f"metrale-ray {metrale_ray.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    generate = commands.add_parser("generate", help="complete prompts", description="Complete prompts and exit.")
    _add_group(generate, "prompts", (*PROMPT_FLAGS, JSON_FLAG))
    _add_group(generate, "sampling", tuple(with_default(flag, sampling_defaults()) for flag in SAMPLING_FLAGS))
    _add_group(generate, "requests", tuple(with_default(flag, REQUEST_DEFAULTS) for flag in REQUEST_FLAGS))
    engine_flags = tuple(with_default(flag, engine_defaults()) for flag in ENGINE_FLAGS)
    _add_group(generate, "engine", (CONFIG_FLAG, *engine_flags))
    demo = commands.add_parser(
        "demo", help="ask a small model one question", description="Ask a small model something."
    )
    _add_group(demo, "question", (QUESTION_FLAG,))
    _add_group(demo, "engine", _engine_flags(DEMO_ENGINE_SETTINGS))
    _add_serve(commands)
    _add_batch(commands)
    _add_chat(commands)
    _add_inspect(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_cluster(commands)
    _add_journals(commands)
    return parser


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "Talk with a model in the terminal. Without --model it is the demo's. /help tells what can be typed."
    chat = commands.add_parser("chat", help="talk with a model in the terminal", description=text)
    _add_group(chat, "conversation", (SYSTEM_FLAG,))
    _add_group(chat, "sampling", tuple(flag for flag in SAMPLING_FLAGS if flag.setting not in NOT_IN_CHAT))
    _add_group(chat, "engine", (CONFIG_FLAG, *ENGINE_FLAGS))


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "Serve a model over HTTP, as OpenAI's API has it, until SIGTERM or Ctrl-C. Without MODEL it is --config's."
    serve = commands.add_parser("serve", help="serve a model over HTTP", description=text)
    serve.add_argument(
        "model_path", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="checkpoint folder or hub id"
    )
    defaults = service_defaults()
    config = dataclasses.replace(CONFIG_FLAG, help="YAML file of these options and engine settings; flags win over it")
    _add_group(serve, "service", (*(with_default(flag, defaults) for flag in SERVICE_FLAGS), config))
    _add_group(serve, "model", tuple(with_default(flag, defaults) for flag in MODEL_FLAGS))
    _add_group(serve, "limits of a request", tuple(with_default(flag, defaults) for flag in LIMIT_FLAGS))
    _add_group(serve, "engine", tuple(with_default(flag, engine_defaults()) for flag in ENGINE_FLAGS))


def _add_batch(commands: argparse._SubParsersAction[Parser]) -> None:
    text = (
        "Answer the requests of a file in OpenAI's batch format into another file. What that answers already is not "
        "asked again, so after an interruption the same command goes on."
    )
    batch = commands.add_parser("batch", help="answer the requests of a file into another file", description=text)
    batch.add_argument("input", metavar="INPUT", help="file with one request in each line")
    batch.add_argument("output", metavar="OUTPUT", help="file that gets one line for each, as the answers come")
    defaults = service_defaults()
    config = dataclasses.replace(CONFIG_FLAG, help="YAML file of these options and engine settings, such as serve's")
    _add_group(batch, "batch", (*BATCH_FLAGS, *STRICTNESS_FLAGS, config))
    _add_group(batch, "model", tuple(with_default(flag, defaults) for flag in MODEL_FLAGS))
    _add_group(batch, "limits of a request", tuple(with_default(flag, defaults) for flag in BATCH_LIMIT_FLAGS))
    _add_group(batch, "engine", tuple(with_default(flag, engine_defaults()) for flag in ENGINE_FLAGS))


def _add_inspect(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "Tell what a checkpoint is and what it takes, from its configuration and the headers of its files alone."
    inspect = commands.add_parser("inspect", help="tell what a checkpoint is and what it takes", description=text)
    inspect.add_argument("model", metavar="MODEL", help="checkpoint folder or hub id")
    _add_group(inspect, "output", (MEMORY_FLAG, OBJECT_FLAG))
    _add_group(inspect, "engine", _engine_flags(INSPECT_ENGINE_SETTINGS))


def _add_doctor(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "Check this machine, or every node of a Ray cluster, and say what to do about what is found."
    doctor = commands.add_parser("doctor", help="check this machine or a cluster", description=text)
    _add_group(doctor, "output", (OBJECT_FLAG, NODE_TIMEOUT_FLAG))
    _add_group(doctor, "engine", _engine_flags(DOCTOR_ENGINE_SETTINGS))


def _add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
    bench = commands.add_parser("bench", help="measure a server", description="Measure a server.")
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    text = "Send requests to any server that speaks OpenAI's API, and tell throughput and times."
    serve = kinds.add_parser("serve", help="send requests to a server and measure", description=text)
    _add_group(serve, "server", bench_flags.TARGET_FLAGS)
    _add_group(serve, "load", bench_flags.LOAD_FLAGS)
    _add_group(serve, "prompts", bench_flags.PROMPT_FLAGS)
    _add_group(serve, "output", (OBJECT_FLAG,))


def _add_cluster(commands: argparse._SubParsersAction[Parser]) -> None:
    cluster = commands.add_parser("cluster", help="bring up a cluster", description="Bring up a cluster.")
    kinds = cluster.add_subparsers(dest="cluster", metavar="WHAT", required=True)
    text = "Write a configuration for `ray up` or Kubernetes. On a terminal, what is missing is asked for."
    yaml = kinds.add_parser("yaml", help="write a configuration for `ray up` or Kubernetes", description=text)
    for title, flags in cluster_flags.GROUPS.items():
        _add_group(yaml, title, flags)
    text = "Wait until all nodes of a cluster have joined Ray, and name those that do not come. Run it on the head."
    wait = kinds.add_parser("wait", help="wait until all nodes have joined Ray", description=text)
    _add_group(wait, "cluster", WAIT_FLAGS)


def _add_journals(commands: argparse._SubParsersAction[Parser]) -> None:
    text = "Show what a journal says: commands, sequences, failures, and how far ranks lagged behind."
    inspect = commands.add_parser("inspect-journal", help="show what a journal says", description=text)
    inspect.add_argument("journal", metavar="JOURNAL", help="a journal's folder, or one file of it, or a dump")
    _add_group(inspect, "which of it", journal_flags.INSPECT_FLAGS)
    _add_group(inspect, "output", (*journal_flags.OUTPUT_FLAGS, *journal_flags.LOG_FLAGS))
    text = "Run a journal again in this process, command by command, and stop at the first difference."
    replay = commands.add_parser("replay", help="run a journal again", description=text)
    replay.add_argument("journal", metavar="JOURNAL", help="a journal's folder")
    _add_group(replay, "ranks", journal_flags.replay_flags())
    _add_group(replay, "output", (*journal_flags.OUTPUT_FLAGS, *journal_flags.LOG_FLAGS))
    text = "Find the first command at which two journals differ, or one journal under two configurations."
    bisect = commands.add_parser("bisect", help="find where two runs of the same commands part", description=text)
    bisect.add_argument("journal", metavar="A", help="a journal's folder")
    bisect.add_argument(
        "other", metavar="B", nargs="?", help="another one; without it A is run twice, as --a and --b say"
    )
    _add_group(bisect, "what is compared", journal_flags.bisect_flags())
    _add_group(bisect, "output", (*journal_flags.OUTPUT_FLAGS, *journal_flags.LOG_FLAGS))


def _engine_flags(settings: tuple[str, ...]) -> tuple[Flag, ...]:
    return tuple(flag for flag in ENGINE_FLAGS if flag.setting in settings)


def _add_group(parser: Parser, title: str, flags: tuple[Flag, ...]) -> None:
    group = parser.add_argument_group(title)
    for flag in flags:
        flag.add_to(group)
