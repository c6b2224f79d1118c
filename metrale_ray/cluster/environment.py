# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ranks get of the driver's environment: listed variables, and nothing else.

A Ray that was started for this engine alone is a child of the driver and has its environment, as any child has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What of the driver's environment goes to the ranks on other nodes: where libraries find models and interfaces. Nothing
# else does, least of all keys and tokens.
FORWARDED_VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
)


def runtime_env(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What a rank gets of the driver's environment; None, which costs nothing, where there is nothing to give."""
    variables = {name: environment[name] for name in FORWARDED_VARIABLES if name in environment}
    return {"env_vars": variables} if variables else None
