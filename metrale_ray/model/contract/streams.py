# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part Streams: order on the device. On a CPU everything is done when a call returns, so these do nothing there."""

from __future__ import annotations

from typing import Any

import torch


class Streams:
    """Streams and events of one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None

    def default_stream(self) -> Any:
        """The device's current stream, or None on a CPU."""
        return torch.cuda.current_stream(self._cuda) if self._cuda else None

    def create_stream(self) -> Any:
        """A new stream, or None on a CPU."""
        return torch.cuda.Stream(self._cuda) if self._cuda else None  # type: ignore[no-untyped-call]

    def create_event(self) -> Any:
        """A new event, or None on a CPU."""
        return torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]

    def record_event(self, event: Any, stream: Any = None) -> None:
        """Record `event` on `stream` (None: the current one)."""
        if self._cuda:
            event.record(stream or self.default_stream())

    def stream_wait_event(self, stream: Any, event: Any) -> None:
        """Make later work on `stream` wait for `event`."""
        if self._cuda:
            stream.wait_event(event)

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""
        if self._cuda:
            torch.cuda.synchronize(self._cuda)
