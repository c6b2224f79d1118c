# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a checkpoint's generation_config.json says for requests that leave it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from metrale_ray.errors import CheckpointError
from metrale_ray.serve.backend import GenerationDefaults
from metrale_ray.serve.loading import http_settings, read_defaults
from metrale_ray.serve.options import service_options


def write(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_a_checkpoint_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == GenerationDefaults()


def test_what_the_file_says_is_read_and_the_rest_is_left_out(tmp_path: Path) -> None:
    text = (
        '{"temperature": 0.6, "top_p": 0.95, "top_k": -1, "max_new_tokens": 99, "eos_token_id": [1, 2], "min_p": null}'
    )
    assert read_defaults(write(tmp_path, text)) == GenerationDefaults(
        temperature=0.6, top_p=0.95, top_k=0, max_tokens=99
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ("[1]", "cannot read"),
        ('{"temperature": "hot"}', "temperature"),
        ('{"top_p": 0}', "top_p is 0"),
        ('{"top_k": 1.5}', "top_k is 1.5"),
        ('{"repetition_penalty": -1}', "repetition_penalty is -1"),
        ('{"max_new_tokens": 0}', "max_tokens is 0"),
        ('{"temperature": NaN}', "temperature is nan"),
    ],
)
def test_a_file_that_would_refuse_every_request_is_refused_at_the_start(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_defaults(write(tmp_path, text))


def test_the_app_is_told_the_services_options() -> None:
    options = service_options(
        {
            "api_key": "key-of-clients",
            "open_path": "/metrics",
            "cors_origin": "https://a.b",
            "strict": True,
            "max_n": 3,
        },
        {"METRALE_ADMIN_KEY": "key-of-admins"},
    )
    settings = http_settings(options)
    assert settings.api_keys == ("key-of-clients",)
    assert settings.admin_keys == ("key-of-admins",)
    assert settings.keyless_paths == ("/health/live", "/metrics")
    assert settings.cors_origins == ("https://a.b",)
    assert (settings.api.strict, settings.api.limits.max_n) == (True, 3)
