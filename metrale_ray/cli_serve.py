# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray serve`: its flags, and what it writes.

Rules: flags win over the YAML file, and the file over the environment, as with the engine's settings. Keys are taken
out of the environment once they are read, before anything is started: Ray's processes and the ranks have no use for
them. Once the service is ready, one line on standard output says where; everything else goes to standard error.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from metrale_ray.cli_flags import Flag, from_environment
from metrale_ray.cli_token import use_ray_token
from metrale_ray.config import read_yaml, warn_unknown_variables
from metrale_ray.errors import UserError
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.options import (
    ACCESS_LOGGER,
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    NONE,
    ServiceOptions,
    model_options,
    service_options,
    split_options,
)

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
NEEDED = ("fastapi", "uvicorn", "pydantic", "jiter", "prometheus_client")

MODEL_FLAGS = (
    Flag(("--served-model-name",), "name of the model for clients; may be repeated", repeats=True),
    Flag(("--chat-template",), "file of a chat template in place of the checkpoint's", metavar="FILE"),
    Flag(("--tool-parser",), "how calls of tools are read", metavar="none|hermes|mistral|llama3_json"),
    Flag(("--reasoning-parser",), "how reasoning is read", metavar="none|think|think_open"),
)
_SHOWN = "a list of processes shows it to everybody on this machine; also "
_NOT_SHOWN = "no list of processes shows it"
SERVICE_FLAGS = (
    Flag(("--host",), "address to listen on; 0.0.0.0 for every interface"),
    Flag(("--port",), "port to listen on; 0 for any free one", int),
    Flag(("--api-key",), f"key that clients must send; may be repeated; {_SHOWN}METRALE_API_KEY", repeats=True),
    Flag(("--api-key-file",), f"file with one such key in each line; {_NOT_SHOWN}", metavar="FILE"),
    Flag(("--admin-key",), f"key of the admin routes; may be repeated; {_SHOWN}METRALE_ADMIN_KEY", repeats=True),
    Flag(("--admin-key-file",), f"file with one such key in each line; {_NOT_SHOWN}", metavar="FILE"),
    Flag(("--open-path",), "path that needs no key, such as /health/ready; may be repeated", repeats=True),
    Flag(("--cors-origin",), "origin of web pages that may ask; may be repeated", repeats=True),
    Flag(("--strict",), "refuse unknown fields instead of ignoring them", switch=True),
    Flag(("--allow-request-templates",), "let a request bring its own chat template", switch=True),
    Flag(("--drain-timeout-s",), "seconds that running requests have once the service is told to stop", float),
    Flag(("--progress-timeout-s",), "seconds without a completed command until /health/progress fails", float),
)
LIMIT_FLAGS = (
    Flag(("--max-n",), "answers to one prompt", int),
    Flag(("--max-best-of",), "answers of which the best are given", int),
    Flag(("--max-stop-strings",), "stop strings of one request", int),
    Flag(("--max-stop-characters",), "characters of one stop string", int),
    Flag(("--max-logprobs",), "most likely tokens that are told of per token", int),
    Flag(("--max-logit-biases",), "tokens with a bias", int),
    Flag(("--max-prompts",), "prompts of one request", int),
    Flag(("--max-messages",), "messages of one conversation", int),
    Flag(("--max-tools",), "tools of one request", int),
    Flag(("--max-body-bytes",), "bytes of a request's body", int),
    Flag(("--max-body-depth",), "brackets within brackets of a request's body", int),
    Flag(("--max-schema-bytes",), "bytes of a JSON schema or a grammar", int),
    Flag(("--max-request-s",), "seconds until a request that is not done has failed", float),
    Flag(("--body-timeout-s",), "seconds for a request's body to come", float),
    Flag(("--grammar-timeout-s",), "seconds to check a grammar", float),
    Flag(("--template-timeout-s",), "seconds to lay out a conversation", float),
    Flag(("--max-template-characters",), "characters of a conversation that is laid out", int),
)


def service_defaults() -> dict[str, str]:
    """The defaults of these flags, as they are shown."""
    values = {**dataclasses.asdict(ServiceOptions()), **dataclasses.asdict(ServeLimits())}
    shown = {name: str(value) for name, value in values.items() if type(value) in (int, float, str)}
    return shown | {
        "served_model_name": "MODEL",
        "chat_template": "the checkpoint's",
        "tool_parser": NONE,
        "reasoning_parser": NONE,
        "api_key": NONE,
        "admin_key": NONE,
        "open_path": "/health/live alone",
        "cors_origin": NONE,
    }


def serve(given: Mapping[str, Any], answers: TextIO) -> int:
    """Serve until a signal ends it; 0 when it ended in order."""
    model, options = _options(given)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}; install them: pip install 'metrale-ray[serve]'")
    use_ray_token(model.config.address)
    from metrale_ray.service.service import Service

    def on_ready(url: str, names: tuple[str, ...], ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            print(f"  rank {rank['rank']}: process {rank['pid']} on {rank['address']}", file=sys.stderr)
        answers.write(f"serving {', '.join(names)} at {url}/v1\n")
        answers.flush()

    Service(model, options, lambda line: print(line, file=sys.stderr)).run(on_ready)
    return 0


def _options(given: Mapping[str, Any]) -> tuple[Any, ServiceOptions]:
    in_file: dict[str, Any] = {}
    if "config" in given:
        model_in_file, service_in_file = split_options(read_yaml(given["config"]))
        in_file = {**model_in_file, **service_in_file}
    flags = {name: value for name, value in given.items() if name not in ("config", "command", "model_path")}
    if "model_path" in given:
        if "model" in flags:
            raise UserError("the model is given twice, as MODEL and as --model; leave one of the two out")
        flags["model"] = given["model_path"]
    for_model, for_service = split_options({**from_environment(os.environ), **in_file, **flags})
    model, options = model_options(for_model), service_options(for_service, os.environ)
    _forget_keys()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("metrale_ray").setLevel(model.config.log_level.upper())
    if model.config.log_level == "warning":  # the default: each request is still one line
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO)
    warn_unknown_variables()
    if options.host not in LOOPBACK_HOSTS and not options.api_keys:
        logging.getLogger("metrale_ray").warning(
            "%s is reached by others, and there is no key: anyone may use this service; set --api-key-file",
            options.host,
        )
    return model, options


def _forget_keys() -> None:
    """What this process starts from now on inherits no keys."""
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE):
        os.environ.pop(variable, None)
