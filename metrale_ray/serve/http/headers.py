# SPDX-License-Identifier: MIT OR Apache-2.0
"""Headers of ours that go with answers."""

from __future__ import annotations

from metrale_ray.serve.openai import request as requests
from metrale_ray.serve.openai.unknown import listed

IGNORED_HEADER = "X-Metrale-Ignored-Fields"


def ignored_fields(request: requests.Request) -> dict[str, str]:
    """The header that names the fields which were given and mean nothing here; none when there are none."""
    names = requests.ignored_fields(request)
    return {IGNORED_HEADER: listed(names)} if names else {}
