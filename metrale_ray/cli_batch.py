# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray batch INPUT OUTPUT`: the requests of a file, answered into another file, in OpenAI's batch format.

Rules. Both files are read and found right before an engine starts, and none starts where nothing is to be asked. Flags
win over the YAML file, which may be one of `serve`. Everything is told on standard error: progress, and a summary in
the end. Exit code 0, or 1 where OUTPUT has errors. Whatever ends it early, the same command goes on.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metrale_ray.cli_bench_flags import positive
from metrale_ray.cli_flags import Flag, from_environment
from metrale_ray.cli_serve import LIMIT_FLAGS, SERVICE_FLAGS
from metrale_ray.config import EngineConfig, read_yaml, warn_unknown_variables
from metrale_ray.errors import UserError
from metrale_ray.serve.options import ModelOptions, ServiceOptions, model_options, service_options, split_options

if TYPE_CHECKING:
    from metrale_ray.batch import Batch, BatchOptions, BatchSummary
    from metrale_ray.batch.engine import BatchEngine

ALL_WELL, REQUEST_FAILED = 0, 1
NEEDED = ("pydantic", "jiter")
LARGE_BYTES = 256 * 2**20
"""Looking at so much takes some seconds, in which a person wonders."""

BATCH_FLAGS = (
    Flag(("--concurrency",), "requests in flight (default: twice --max-batch-size)", positive, "N"),
    Flag(("--retry-errors",), "ask again what OUTPUT has as errors", switch=True),
)
_OF_SERVICE = ("strict", "allow_request_templates")
STRICTNESS_FLAGS = tuple(flag for flag in SERVICE_FLAGS if flag.setting in _OF_SERVICE)
BATCH_LIMIT_FLAGS = tuple(flag for flag in LIMIT_FLAGS if flag.setting != "body_timeout_s")  # no body arrives

Open = Callable[[EngineConfig], "AbstractContextManager[BatchEngine]"]


def batch(given: Mapping[str, Any], open_llm: Open) -> int:
    """Answer what OUTPUT does not answer yet, and give the exit code."""
    model, options = _options(given)
    source = Path(given["input"])
    if source.is_file() and source.stat().st_size >= LARGE_BYTES:
        _tell(f"reading {source}")
    from metrale_ray.batch import open_batch

    with open_batch(source, Path(given["output"]), options) as opened:
        try:
            summary = _run(opened, model.config, open_llm)
        except KeyboardInterrupt:
            _tell(opened.how_to_go_on)
            raise
    _tell(str(summary))
    return REQUEST_FAILED if summary.num_errors else ALL_WELL


def _run(opened: Batch, config: EngineConfig, open_llm: Open) -> BatchSummary:
    for note in opened.notes:
        _tell(f"warning: {note}")
    tally = opened.tally
    if tally.num_before:
        _tell(f"{tally.num_before} of {tally.num_requests} requests are answered already")
    if not opened.needs_engine:
        return opened.run(None)
    with open_llm(config) as llm:
        return opened.run(llm)


def _options(given: Mapping[str, Any]) -> tuple[ModelOptions, BatchOptions]:
    """What was asked for. Raises UserError."""
    in_file: dict[str, Any] = {}
    if "config" in given:
        of_model, of_service = split_options(read_yaml(given["config"]))
        in_file = {**of_model, **of_service}
    own = ("config", "command", "input", "output", *(flag.setting for flag in BATCH_FLAGS))
    flags = {name: value for name, value in given.items() if name not in own}
    for_model, for_service = split_options({**from_environment(os.environ), **in_file, **flags})
    limits = (flag.setting for flag in BATCH_LIMIT_FLAGS)
    kept = {name: for_service[name] for name in (*_OF_SERVICE, *limits) if name in for_service}
    model, service = model_options(for_model), service_options(kept, {})
    _begin_log(model.config)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"batch needs {', '.join(missing)}; install them: pip install 'metrale-ray[serve]'")
    return model, _batch_options(given, model, service)


def _batch_options(given: Mapping[str, Any], model: ModelOptions, service: ServiceOptions) -> BatchOptions:
    from metrale_ray.batch import BatchOptions

    return BatchOptions(
        served_model_name=model.served_names,
        chat_template=model.chat_template,
        tool_parser=model.tool_parser,
        reasoning_parser=model.reasoning_parser,
        concurrency=given.get("concurrency"),
        retry_errors=given.get("retry_errors", False),
        strict=service.strict,
        allow_request_templates=service.allow_request_templates,
        limits=service.limits,
    )


def _begin_log(config: EngineConfig) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("metrale_ray").setLevel(config.log_level.upper())
    warn_unknown_variables()


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
