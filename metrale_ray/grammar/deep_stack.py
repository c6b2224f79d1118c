# SPDX-License-Identifier: MIT OR Apache-2.0
"""`with_deep_stack`: runs something that recurses as deep as its input says, where the stack does not end first.

llguidance follows rules and references by recursion, some kilobytes a level, and a stack that ends ends the process.
The size here is enough for the longest text that is taken with a level in each of its rules. It is address space;
memory is used only as far as the recursion goes, and is given back with the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from metrale_ray.errors import RequestError
from metrale_ray.grammar.library import INVALID

STACK_BYTES = 512 * 2**20
"""Of 2**18 characters every rule takes 9 at least; a level took up to 8 KB where it was measured."""

_setting = threading.Lock()
"""Held while the size of new stacks is another one than the process's own."""

T = TypeVar("T")


def with_deep_stack(work: Callable[[], T]) -> T:
    """What `work` gives or raises, in a thread of its own. Raises RequestError where no such thread can be had."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  the caller's to hear of
            errors.append(error)
        except BaseException as error:  # noqa: BLE001  a panic in Rust is no Exception
            errors.append(RequestError(f"the grammar is refused: it makes llguidance fail: {error}", code=INVALID))

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    _start(thread)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _start(thread: threading.Thread) -> None:
    """The size is a setting of the process: one thread at a time sets it, starts and puts it back.

    What others start meanwhile may get it too, which costs them nothing.
    """
    with _setting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise RequestError(
                f"no thread with a stack of {STACK_BYTES >> 20} MiB could be started for the grammar ({error}); "
                "allow this process more address space or threads",
                code=INVALID,
            ) from error
        finally:
            threading.stack_size(before)
