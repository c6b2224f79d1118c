# SPDX-License-Identifier: MIT OR Apache-2.0
"""An answer that is made of content and of calls of tools, in the form of one family of models.

Rules. Each call stands behind a marker, or behind another call. What begins as a call and turns out to be none is
content, all of it. A call that is certain is shown as it comes; if it then breaks off, what was shown stays, what
follows is content, and the answer has no whole calls. White space beside a call is shown only between two parts of
content. Time is in proportion to the text: what was read as a call in JSON is not looked through again. `</tool_call>`
and the like within a string of the arguments are a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from metrale_ray.serve.parsing.call_object import CallObject
from metrale_ray.serve.parsing.content_text import ContentText
from metrale_ray.serve.parsing.expected import Expected
from metrale_ray.serve.parsing.json_value import space_end
from metrale_ray.serve.parsing.marker import Marker
from metrale_ray.serve.parsing.pieces import CallDelta, Piece


class CallReader(Protocol):
    """Reads one call, such as `CallObject`. `is_short`: what it reads before a call is certain has few characters."""

    name: str | None
    is_done: bool
    is_broken: bool
    is_short: bool

    def push(self, text: str, at: int) -> int:
        """Read on from `text[at]`; the place behind what was read."""
        ...

    def drain(self) -> str:
        """The arguments that were read since the last time."""
        ...


class CallText:
    """An `OutputParser` for calls as JSON objects behind `marker`. A family says what differs."""

    def __init__(self, marker: str) -> None:
        self._marker = Marker(marker)
        self._content = ContentText()
        self._held: list[str] = []  # what may be the beginning of a call, the marker or what stands for it first
        self._deltas: list[CallDelta] = []
        self._call: CallReader = CallObject()
        self._is_shown = False  # whether this call is certain, and its name given
        self._index = 0
        self._num_whole = 0
        self.has_cut_call = False
        self._is_cut = False  # the same, or the text ended in what may have been a call
        self._expected = Expected(())
        self._read: Callable[[str, int], int] = self._in_content

    @property
    def has_calls(self) -> bool:
        """Whether at least one call is whole, and none is cut."""
        return self._num_whole > 0 and not self._is_cut

    def push(self, text: str) -> Piece:
        """Take the text that is new."""
        self._go_through(text)
        return self._piece(self._content.drain())

    def flush(self) -> Piece:
        """The end of the text. A call that is not whole is cut; one that is not certain is content."""
        if self._read == self._in_call:
            self._cut()
        for text in self._held:
            self._content.add(text)
        self._held.clear()
        self._content.add(self._marker.flush())
        self._read = self._in_content
        return self._piece(self._content.flush())

    def _go_through(self, text: str) -> None:
        at = 0
        while at < len(text):
            at = self._read(text, at)

    def _piece(self, content: str) -> Piece:
        calls = tuple(self._deltas)
        self._deltas.clear()
        return Piece(content=content, calls=calls)

    def _in_content(self, text: str, at: int) -> int:
        content, at, is_found = self._marker.push(text, at)
        self._content.add(content)
        if is_found:
            self._marked()
        return at

    def _marked(self) -> None:
        """The marker was read: a call is to follow."""
        self._open(self._marker.marker)

    def _open(self, text: str) -> None:
        """A call is to follow `text`."""
        self._held = [text]
        self._read = self._before_call

    def _before_call(self, text: str, at: int) -> int:
        end = space_end(text, at)
        self._held.append(text[at:end])
        return end if end == len(text) else self._open_call(text, end)

    def _open_call(self, text: str, at: int) -> int:
        """Begin what `text[at]` begins; the place behind what was read for it."""
        if text[at] == "{":
            self._begin(self._object())
        else:
            self._give_up(rereads=True)
        return at

    def _object(self) -> CallObject:
        return CallObject()

    def _begin(self, call: CallReader) -> None:
        self._call, self._is_shown, self._read = call, False, self._in_call

    def _in_call(self, text: str, at: int) -> int:
        end = self._call.push(text, at)
        if self._call.name is None:
            self._held.append(text[at:end])
        else:
            self._show(self._call.name, self._call.drain())
        if self._call.is_done:
            self._end_call()
        elif self._call.is_broken:
            self._give_up(rereads=self._call.is_short and not self._is_shown)
        return end

    def _show(self, name: str, arguments: str) -> None:
        is_first = not self._is_shown
        if is_first:
            self._is_shown = True
            self._held.clear()
            self._content.edge()
        if is_first or arguments:
            self._deltas.append(CallDelta(self._index, name if is_first else None, arguments))

    def _end_call(self) -> None:
        self._index += 1
        self._num_whole += 1
        self._expected = Expected(self._followers())
        self._read = self._behind_call

    def _followers(self) -> Mapping[str, Callable[[str], None]]:
        """What may follow a call and is no content, and what is done with it."""
        return {}

    def _open_next(self, bracket: str) -> None:
        """Another call follows with nothing between; its bracket is read already."""
        self._begin(self._object())
        self._in_call(bracket, 0)

    def _behind_call(self, text: str, at: int) -> int:
        if not self._expected.held:
            at = space_end(text, at)
        at = self._expected.push(text, at)
        if self._expected.found is not None:
            self._followers()[self._expected.found](self._expected.found)
        elif self._expected.is_missing:
            self._read = self._in_content
            self._go_through(self._expected.held)
        return at

    def _close(self, text: str) -> None:
        """Content is to follow `text`, which ends what calls stand in."""
        self._read = self._in_content

    def _cut(self) -> None:
        self._is_cut = True
        self.has_cut_call = self.has_cut_call or self._is_shown

    def _give_up(self, *, rereads: bool) -> None:
        """This is no call: what was held back is content. `rereads`: a marker may be in it, behind its first part."""
        if self._is_shown and self._read == self._in_call:
            self._cut()
            self._index += 1
        held = self._held or [""]
        self._held, self._read = [], self._in_content
        self._content.add(held[0])
        rest = "".join(held[1:])
        if rereads:
            self._go_through(rest)
        else:
            self._content.add(rest)
