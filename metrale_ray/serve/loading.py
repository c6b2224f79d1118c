# SPDX-License-Identifier: MIT OR Apache-2.0
"""From options and a checkpoint's folder to what the HTTP side is made of.

What it leaves out: the engine, and whether the checkpoint can be served at all (`model_files`).
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from metrale_ray.errors import CheckpointError, RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.backend import Backend, GenerationDefaults, ServedModel
from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.options import ModelOptions, ServiceOptions
from metrale_ray.serve.structured import GrammarChecks
from metrale_ray.serve.templates.load import load_template
from metrale_ray.serve.templates.renderer import Renderer
from metrale_ray.serve.text import Tokenizer

GENERATION_CONFIG = "generation_config.json"


def template_of(options: ModelOptions, tokenizer: Tokenizer | None, limits: ServeLimits) -> Renderer:
    """Lays out the model's conversations. Raises CheckpointError and ConfigError for a template that cannot be used."""
    return load_template(tokenizer, None if options.chat_template is None else Path(options.chat_template), limits)


async def hold_template(template: Renderer) -> None:
    """Keep its processes until cancelled."""
    try:
        if template.has_template:
            await template.start()
        await asyncio.Event().wait()
    finally:
        template.close()


async def hold_grammars(grammars: GrammarChecks) -> None:
    """Keep their processes until cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        grammars.close()


def served_model(
    path: Path,
    options: ModelOptions,
    tokenizer: Tokenizer | None,
    template: Renderer,
    backend: Backend,
    max_model_len: int,
    grammars: GrammarChecks,
) -> ServedModel:
    """One model as the HTTP side knows it; `grammars` are those of the service.

    Raises CheckpointError for a generation_config.json that cannot be used.
    """
    return ServedModel(
        names=options.served_names,
        backend=backend,
        tokenizer=tokenizer,
        template=template,
        defaults=read_defaults(path),
        max_model_len=max_model_len,
        created=int(time.time()),
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        grammars=grammars,
    )


def http_settings(options: ServiceOptions) -> HttpSettings:
    """What the app is told of the service's options."""
    return HttpSettings(
        api=ApiSettings(options.limits, options.strict, options.allow_request_templates),
        api_keys=options.api_keys,
        admin_keys=options.admin_keys,
        open_paths=options.open_paths,
        cors_origins=options.cors_origins,
    )


def read_defaults(path: Path) -> GenerationDefaults:
    """What the checkpoint's generation_config.json says for requests that leave it out. Raises CheckpointError.

    `do_sample` is not looked at, as other servers do not either: what it says of temperature counts.
    """
    file = path / GENERATION_CONFIG
    if not file.is_file():
        return GenerationDefaults()
    try:
        values = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    found = {name: values[own] for name, own in _NAMES.items() if values.get(own) is not None}
    try:
        checked = SamplingParams(**found)
    except (RequestError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be used for requests: {error}") from error
    return GenerationDefaults(**{name: getattr(checked, name) for name in found})


_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
"""Of each parameter, its name in the file."""
