# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Model`: the interface between the head's step loop and a model, made of its parts.

Parts present: Lifecycle, Forward, Logits, ExpertLoad, Agreement, Ep, Streams. A part joins when its first real
implementation does. One thread makes every call but that of ExpertLoad.
"""

from __future__ import annotations

from metrale_ray.model.contract.agreement import Agreement
from metrale_ray.model.contract.ep import Ep
from metrale_ray.model.contract.expert_load import ExpertLoad
from metrale_ray.model.contract.forward import Forward
from metrale_ray.model.contract.lifecycle import Lifecycle
from metrale_ray.model.contract.logits import LogitsPart
from metrale_ray.model.contract.streams import Streams


class Model(Lifecycle, Forward, LogitsPart, ExpertLoad, Agreement):
    """What the head and the workers hold. `ep` is its link to the other ranks, `streams` its device's order."""

    ep: Ep
    streams: Streams
