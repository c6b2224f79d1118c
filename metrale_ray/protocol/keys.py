# SPDX-License-Identifier: MIT OR Apache-2.0
"""`KeyPair`: who a process is on the wire, and how a socket is told to use it (CURVE: authenticated and encrypted).

Rules: each process makes its own pair and the secret half never leaves it: it is not shown, copied or pickled. Keys are
the 40 characters of their Z85 text (ZeroMQ RFC 32). A calling end knows the key that the listening end must have, and
a listening end takes the keys it was given and no others, which `door` decides.

What it leaves out: files and reuse. A pair lives as long as its process, so that a process of an earlier launch is a
stranger.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NoReturn

import zmq
from zmq.utils import z85

from metrale_ray.errors import StartError

KEY_CHARACTERS = 40
"""A key of 32 bytes in Z85."""

CURVE_FRAME_BYTES = 33
"""What encryption adds to a frame: the command's name (8), a nonce (8), the authenticator (16) and the flags (1)."""

_ZAP_DOMAIN = b"metrale"


class KeyPair:
    """A public key, which others may know, and its secret, which stays here.

    No dataclass: what lists the fields of one, as `asdict` does, would give the secret out.
    """

    __slots__ = ("public", "secret")

    def __init__(self, public: str, secret: str) -> None:
        self.public: Final = public
        self.secret: Final = secret

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key pair holds a secret and cannot be copied or pickled; send its public key")


def new_keys() -> KeyPair:
    """A new pair. Raises StartError where this pyzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise StartError("this pyzmq has no CURVE, so links cannot be secured; install pyzmq from its wheels")
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def raw_key(public_key: str) -> bytes:
    """The 32 bytes of a public key. Raises StartError for a text that is none."""
    try:
        if len(public_key) == KEY_CHARACTERS:
            return bytes(z85.decode(public_key))
    except (ValueError, KeyError, struct.error):
        pass  # told below, as a text of another length is
    raise StartError(f"{public_key!r} is no public key; it must be {KEY_CHARACTERS} characters of Z85")


def listen_with(socket: zmq.Socket[Any], keys: KeyPair) -> None:
    """Make `socket` take CURVE alone, and nobody at all while no `Door` stands in its context."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
    socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def call_with(socket: zmq.Socket[Any], keys: KeyPair, peer_key: str) -> None:
    """Make `socket` show `keys`, and speak to the owner of `peer_key` alone. Raises StartError for what is no key."""
    raw_key(peer_key)
    socket.set(zmq.CURVE_SERVERKEY, peer_key.encode("ascii"))
    socket.set(zmq.CURVE_PUBLICKEY, keys.public.encode("ascii"))
    socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
