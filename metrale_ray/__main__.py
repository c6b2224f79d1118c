# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line's first moments: `metrale-ray` and `python -m metrale_ray` begin here.

Importing the commands takes a while, and an interrupt in it would be a traceback from the middle of some library.
Until they are there, an interrupt and SIGTERM end the process at once: nothing was started that would have to be ended
first. From then on both unwind through the commands' own clean-up.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # not from `typing`: little is imported before interrupts are handled
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143


def main() -> NoReturn:
    """Run the command line and end the process."""
    # A process that was started with interrupts ignored, as shells do in the background, keeps ignoring them.
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if handled:
            signal.signal(signal.SIGINT, leave)
        signal.signal(signal.SIGTERM, leave)
        from metrale_ray.cli import entry
        from metrale_ray.termination import interrupt_at_sigterm, was_terminated

        interrupt_at_sigterm()
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        entry()
    except KeyboardInterrupt:  # just before or after the time in which `cli.main` waits for it
        leave(signal.SIGTERM if was_terminated() else signal.SIGINT, None)


def leave(signal_number: int, frame: FrameType | None) -> NoReturn:
    """End the process at once, as the command line does when it is interrupted or terminated."""
    is_interrupt = signal_number == signal.SIGINT
    os.write(2, b"interrupted\n" if is_interrupt else b"terminated\n")
    os._exit(INTERRUPTED if is_interrupt else TERMINATED)


if __name__ == "__main__":
    main()
