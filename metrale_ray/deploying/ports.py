# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ray's ports on every node, fixed so that a firewall can name them.

Between the nodes of a cluster every port is open: the engine's ranks and Ray Serve listen on ports that the system
chooses. From outside, none of these is to be reached.
"""

from __future__ import annotations

GCS_PORT = 6379
DASHBOARD_PORT = 8265
RAY_CLIENT_PORT = 10001
NODE_PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-grpc-port": 6383,
    "metrics-export-port": 6384,
    "dashboard-agent-listen-port": 52365,
    "min-worker-port": 20000,
    "max-worker-port": 20999,
}
