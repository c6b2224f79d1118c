# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line's flags, in tables, and the way from flags to settings.

Rules: a flag that was not given leaves no trace, so that flags win over the YAML file and the file over the
environment. Values are checked where the settings are (`config`, `sampling.params`), so a flag, a file and the driver
refuse alike.

What it leaves out: which command has which (`cli_parser`), what the commands do (`cli`), and where prompts come from
(`cli_prompts`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metrale_ray.config import (
    ATTENTION_BACKENDS,
    ATTENTIONS,
    DTYPES,
    KERNELS,
    LOG_LEVELS,
    PLACEMENTS,
    QUANTIZATIONS,
    EngineConfig,
    by_field_name,
    from_mapping,
    from_yaml,
    parse_size_bytes,
)
from metrale_ray.errors import ConfigError
from metrale_ray.sampling.params import U32_MAX, SamplingParams

# What is meant where nothing is given and the setting itself has no value.
CHOSEN_DEFAULTS = {
    "revision": "the hub's main",
    "name": "none",
    "max_model_len": "the model's",
    "ep_protocol": "v2",
    "kv_cache_memory": "a share of the memory that is free",
    "address": "none",
    "journal": "none",
    "journal_max_size": "1GiB",
    "journal_max_age_s": "7 days",
    "num_cpus_per_rank": "the node's cores, shared by its ranks",
    "num_gpus_per_rank": "1 on cuda, else 0",
    "pin": "on",
}
REQUEST_DEFAULTS = {"priority": "0", "timeout_s": "none"}
DEFAULT_QUESTION = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. The first name gives the setting's name.

    `repeats`: may be given again; `switch`: takes no value; `negatable`: a switch that --no- and its name puts off.
    """

    names: tuple[str, ...]
    help: str
    kind: Callable[[str], Any] = str
    metavar: str | None = None
    repeats: bool = False
    switch: bool = False
    negatable: bool = False

    @property
    def setting(self) -> str:
        """The name under which the value is found."""
        return self.names[0].removeprefix("--").replace("-", "_")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Let `parser` know this flag."""
        if self.switch:
            kind = argparse.BooleanOptionalAction if self.negatable else "store_true"
            parser.add_argument(*self.names, action=kind, default=argparse.SUPPRESS, help=self.help)
            return
        action = "append" if self.repeats else "store"
        metavar = self.metavar or {int: "N", float: "X"}.get(self.kind, "TEXT")  # type: ignore[call-overload]
        parser.add_argument(
            *self.names, action=action, type=self.kind, metavar=metavar, default=argparse.SUPPRESS, help=self.help
        )


def token_ids(text: str) -> list[int]:
    """The token ids in a text such as "1,2,3"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= U32_MAX for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be token ids with commas between them, such as 1,2,3")
    return [int(part) for part in parts]


def size_bytes(text: str) -> int:
    """The bytes that a text such as "2GiB" means."""
    try:
        return parse_size_bytes(text, "the size")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def seconds(text: str) -> float:
    """A time that a text such as "10" or "2.5" means."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0, such as 30")
    return value


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in `text`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text[:60]!r} must be a JSON object, such as {{"5": -100}}')
    return value


ENGINE_FLAGS = (
    Flag(("--model",), "checkpoint folder or hub id", metavar="DIR"),
    Flag(("--revision",), "branch, tag or commit of a hub id"),
    Flag(("--ep-size",), "ranks that the experts are spread over", int),
    Flag(("--max-batch-size", "--max-num-seqs"), "sequences in one step", int),
    Flag(("--max-model-len",), "tokens in one sequence, prompt and answer", int),
    Flag(("--max-num-batched-tokens",), "tokens in one step", int),
    Flag(("--max-queue-len",), "requests that may wait; more are refused", int),
    Flag(("--dtype",), "type of the weights and the cache", metavar="|".join(DTYPES)),
    Flag(("--device",), "where the ranks compute", metavar="auto|cpu|cuda"),
    Flag(("--quantization",), "hold layers' weights in fewer bits, CPUs only", metavar="|".join(QUANTIZATIONS)),
    Flag(("--kernels",), "what computes on CPUs: the native core or PyTorch", metavar="|".join(KERNELS)),
    Flag(("--attention",), "whether ranks hold all heads or share them out", metavar="|".join(ATTENTIONS)),
    Flag(("--attention-backend",), "what computes attention", metavar="|".join(ATTENTION_BACKENDS)),
    Flag(("--ep-protocol",), "version of the command protocol", metavar="v1|v2"),
    Flag(("--kv-cache-memory",), "memory of a rank's KV cache, such as 512MiB or 2GiB", size_bytes, metavar="SIZE"),
    Flag(("--block-size",), "tokens in one block of the KV cache", int),
    Flag(("--watermark",), "share of the blocks that stays free when a sequence is admitted", float),
    Flag(("--seed",), "seed of the requests that have none", int),
    Flag(("--name",), "name of the engine on a Ray that others use too"),
    Flag(("--address",), "address of a running Ray; none starts one here"),
    Flag(("--placement",), "how Ray places the ranks on nodes", metavar="|".join(PLACEMENTS)),
    Flag(("--num-cpus-per-rank",), "cores of one rank; below 1 shares a core", float),
    Flag(("--num-gpus-per-rank",), "GPUs of one rank, or a share of one", float),
    Flag(("--pin",), "keep each CPU rank's threads on CPUs of its own", switch=True, negatable=True),
    Flag(("--start-timeout-s",), "seconds until a start that is not done has failed", float),
    Flag(("--placement-timeout-s",), "seconds to wait for the cluster to have room", float),
    Flag(("--step-timeout-s",), "seconds until a step that is not done has failed", float),
    Flag(("--idle-ping-s",), "seconds between two pings of an idle engine", float),
    Flag(("--agreement-interval",), "commands between two comparisons of what the ranks computed; 0 for never", int),
    Flag(("--scrub",), "look for damaged weights and cache rows while idle", switch=True),
    Flag(("--journal",), "folder on the head's node for a journal of all that the engine does", metavar="DIR"),
    Flag(("--journal-redact",), "leave prompts, tokens and texts out of the journal", switch=True),
    Flag(("--journal-max-size",), "what all journals in that folder may take, such as 1GiB", size_bytes, "SIZE"),
    Flag(("--journal-max-age-s",), "seconds that a part of a journal is kept", float),
    Flag(("--log-level",), "what is logged", metavar="|".join(LOG_LEVELS)),
)
CONFIG_FLAG = Flag(("--config",), "YAML file of engine settings; flags win over it", metavar="FILE")
PROMPT_FLAGS = (
    Flag(("--prompt",), "a prompt; may be repeated", repeats=True),
    Flag(("--prompt-token-ids",), "a prompt as token ids, 1,2,3; may be repeated", token_ids, "IDS", repeats=True),
    Flag(
        ("--prompts-file",), 'a file with {"prompt": ...} or {"prompt_token_ids": [...]} in each line', metavar="FILE"
    ),
    Flag(("--chat",), "each prompt is a user's message, put into the model's chat template", switch=True),
)
SAMPLING_FLAGS = (
    Flag(("--n",), "answers to each prompt", int),
    Flag(("--max-tokens",), "tokens to generate at most", int),
    Flag(("--min-tokens",), "tokens before anything but --max-tokens may end the output", int),
    Flag(("--temperature",), "0 takes the most likely token", float),
    Flag(("--top-k",), "choose among the k most likely tokens; 0 for all", int),
    Flag(("--top-p",), "choose among the most likely tokens that have this probability together", float),
    Flag(("--min-p",), "choose among the tokens at least so many times as likely as the most likely one", float),
    Flag(("--repetition-penalty",), "above 1 makes tokens of the prompt and the output less likely", float),
    Flag(("--presence-penalty",), "above 0 makes tokens of the output less likely", float),
    Flag(("--frequency-penalty",), "above 0 makes them less likely each time they occur", float),
    Flag(("--sampling-seed",), "seed of each prompt's choices; without it one follows from --seed", int),
    Flag(("--logit-bias",), 'what to add to the logits of some token ids, {"5": -100}', json_object, "JSON"),
    Flag(("--allowed-token-ids",), "token ids that alone may occur in the output, 1,2,3", token_ids, "IDS"),
    Flag(("--bad-words",), "text that may not occur in the output; may be repeated", repeats=True),
    Flag(("--bad-token-ids",), "token ids that may not follow one another; may be repeated", token_ids, "IDS", True),
    Flag(("--stop",), "text that ends the output; may be repeated", repeats=True),
    Flag(("--stop-token-ids",), "token ids that end the output, 1,2,3", token_ids, "IDS"),
    Flag(("--include-stop-str-in-output",), "leave what ended the output at its end", switch=True),
    Flag(("--keep-special-tokens",), "show special tokens, such as the end of the sequence, as text", switch=True),
    Flag(("--structured-outputs",), 'shape of the output, {"choice": ["yes", "no"]}', json_object, "JSON"),
    Flag(("--ignore-eos",), "go on after the end-of-sequence token", switch=True),
    Flag(("--logprobs",), "with --json: log probabilities of the tokens and of the N most likely ones", int),
    Flag(("--prompt-logprobs",), "with --json: the same for the tokens of the prompt", int),
)
REQUEST_FLAGS = (
    Flag(("--priority",), "requests with a lower number go first", int),
    Flag(("--timeout-s",), "seconds until a request that is not done has failed", float),
)
JSON_FLAG = Flag(("--json",), "one line of JSON for each prompt, in order", switch=True)
QUESTION_FLAG = Flag(("--question",), f"what to ask; {DEFAULT_QUESTION!r} if left out")
SYSTEM_FLAG = Flag(("--system",), "the system message: what the model is told before the conversation")
# One answer at a time, as text: more of them, or numbers, have no place in a conversation.
NOT_IN_CHAT = ("n", "logprobs", "prompt_logprobs")
MEMORY_FLAG = Flag(("--memory",), "memory of one rank, such as 16GiB: what fits into it", size_bytes, metavar="SIZE")
INSPECT_ENGINE_SETTINGS = (
    "revision",
    "ep_size",
    "max_model_len",
    "dtype",
    "device",
    "quantization",
    "block_size",
    "log_level",
)
DOCTOR_ENGINE_SETTINGS = ("model", "revision", "address", "log_level")
NODE_TIMEOUT_FLAG = Flag(("--timeout-s",), "seconds for each node to answer", seconds)
OBJECT_FLAG = Flag(("--json",), "one JSON object instead of a table", switch=True)
DEMO_ENGINE_SETTINGS = ("ep_size", "ep_protocol", "address", "log_level")


def with_default(flag: Flag, defaults: Mapping[str, str]) -> Flag:
    """The flag with its default in its help. A switch is off, and a list empty, unless it is given."""
    default = defaults.get(flag.setting)
    return flag if default is None else dataclasses.replace(flag, help=f"{flag.help} (default: {default})")


def sampling_defaults() -> dict[str, str]:
    """The defaults of the sampling flags, as they are shown."""
    values = SamplingParams()
    named = {field.name: getattr(values, field.name) for field in dataclasses.fields(SamplingParams)}
    shown = {name: f"{value}" for name, value in named.items() if type(value) in (int, float)}
    return shown | {"logprobs": "none", "prompt_logprobs": "none", "allowed_token_ids": "all"}


def engine_defaults() -> dict[str, str]:
    """The defaults of the engine's flags, as they are shown."""
    fields = dataclasses.fields(EngineConfig)
    return {f.name: str(f.default) for f in fields if type(f.default) in (int, float, str)} | CHOSEN_DEFAULTS


def engine_config(given: Mapping[str, Any], environment: Mapping[str, str], **defaults: Any) -> EngineConfig:
    """The engine's settings: flags, then the YAML file, then the environment, then `defaults`. Raises ConfigError."""
    in_file = from_yaml(given["config"]) if "config" in given else {}
    flags = {flag.setting: given[flag.setting] for flag in ENGINE_FLAGS if flag.setting in given}
    return from_mapping({**by_field_name(defaults), **from_environment(environment), **in_file, **flags})


def from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that the environment has. Raises ConfigError."""
    found: dict[str, str] = {}
    if environment.get("RAY_ADDRESS"):
        found["address"] = environment["RAY_ADDRESS"]
    level = environment.get("METRALE_LOG_LEVEL")
    if level is not None:
        if level not in LOG_LEVELS:
            raise ConfigError(f"METRALE_LOG_LEVEL is {level!r}; allowed are {', '.join(LOG_LEVELS)}")
        found["log_level"] = level
    return found


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters that were given. Raises RequestError."""
    values = {flag.setting: given[flag.setting] for flag in SAMPLING_FLAGS if flag.setting in given}
    if "sampling_seed" in values:
        values["seed"] = values.pop("sampling_seed")
    if "keep_special_tokens" in values:
        values["skip_special_tokens"] = not values.pop("keep_special_tokens")
    return SamplingParams(**values)


def request_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Priority and time limit, as far as they were given. Raises RequestError."""
    from metrale_ray.serve.prompts import check_priority, check_timeout_s

    checks = {"priority": check_priority, "timeout_s": check_timeout_s}
    return {name: check(given[name]) for name, check in checks.items() if name in given}
