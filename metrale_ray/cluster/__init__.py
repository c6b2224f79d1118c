# SPDX-License-Identifier: MIT OR Apache-2.0
"""One engine on Ray: its placement group and its actors, from start to end.

cluster      `Cluster`: start, watch, stop, close
running      `RunningEngine`: an engine that somebody else started
address      which Ray is meant
actors       the head and the workers as actors
names        the names that actors have on a Ray
environment  what ranks get of the driver's environment
placement    what the ranks need of the nodes, and why they cannot have it
endings      why a rank has ended, out of what Ray says
"""

from metrale_ray.cluster.cluster import Cluster
from metrale_ray.cluster.names import NAMESPACE

__all__ = ["NAMESPACE", "Cluster"]
