# SPDX-License-Identifier: MIT OR Apache-2.0
"""How fronts reach the head: one socket session each, the same strict frames as the ranks' links, never pickle.

    messages     what each side says
    frames       the bytes of each message; params_map and logprobs_map the maps inside them
    server       the head's end: the sessions of all fronts, on the head's event loop
    router       their one socket; outbox what one of them has not read yet
    connection   a front's end of the wire: the thread that owns the sockets
    handle       one request as its reader sees it
    questions    what a front has asked of the engine's figures
    client       a front's session: submits, hands out what comes back, and answers everybody when the engine dies

A session: Open, Opened, then any number of Submit, Abort and Finish one way and Outputs the other. A front may Ask how
the engine is, and is Told its figures. Both sides beat. A front says how many Outputs it has taken; what it has no room
for waits at the head. One that falls too far behind, is silent, or says what the protocol does not allow is dropped,
and its requests are aborted. Dead ends a session: no answer comes on it any more.

Who may connect is decided by keys (`protocol.keys`): the head takes the fronts whose public keys it was told, and no
others, and a front speaks to the owner of the head's key alone. All of it is encrypted.

What it leaves out: what a request's tokens mean, and how the keys get to both sides.
"""

from metrale_ray.protocol.front.client import FrontClient
from metrale_ray.protocol.front.connection import Connect, Connection
from metrale_ray.protocol.front.handle import RequestHandle
from metrale_ray.protocol.front.messages import Abort, Finish, Opened, Output, Submit
from metrale_ray.protocol.front.router import FrontRouter, IsAllowed, Part, Router
from metrale_ray.protocol.front.server import FrontId, FrontServer
from metrale_ray.scheduler.request import FinishReason

__all__ = [
    "Abort",
    "Connect",
    "Connection",
    "Finish",
    "FinishReason",
    "FrontClient",
    "FrontId",
    "FrontRouter",
    "FrontServer",
    "IsAllowed",
    "Opened",
    "Output",
    "Part",
    "RequestHandle",
    "Router",
    "Submit",
]
