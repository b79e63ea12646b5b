"""The frame of incremental parsers: text in any pieces in, deltas of the message out.

A parser is a state machine over a buffer. A state consumes text, adds what it found, and says whether another state
may go on; what it leaves in the buffer may still change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.chat.messages import Message, ToolCall
from tunesmith.chat.parsers.call_format import ReadCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Reasoning, content and calls that one piece of text adds to the message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


def join_deltas(deltas: Iterable[Delta]) -> Message:
    """Concatenate deltas into the assistant message."""
    deltas = list(deltas)
    return Message(
        role="assistant",
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas) or None,
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
    )


CALL_ID_LENGTH = 9
"""Length of tool call ids, as the strictest templates require it."""


class IncrementalParser(ABC):
    """Parses one reply: `feed` its text in any pieces, then `finish`; or `parse` the complete text.

    `prefix` is the start of the reply that was not sampled; it is not searched for stop strings. Text from a stop
    string on is dropped, with `keeps_stop` only what follows it.
    """

    def __init__(
        self,
        *,
        new_call_id: Callable[[], str],
        is_single_call: bool = False,
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        prefix: str = "",
    ) -> None:
        self._new_call_id = new_call_id
        self._used_ids: set[str] = set()
        self._is_single_call = is_single_call
        self._stop = StopStrings(stop, keeps_stop=keeps_stop)
        self._buffer = prefix
        self._parse_state: Callable[[Any, bool], bool] = type(self)._parse_start
        """A method that is not bound: the parser would refer to itself, and be freed only as garbage is collected."""
        self._held_space = ""
        """Whitespace that is left out unless content follows."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found; later text is ignored."""
        return self._stop.found

    def feed(self, text: str) -> Delta:
        """Parse more text; returns what can no longer change."""
        return self._advance(text, is_end=False)

    def finish(self) -> Delta:
        """End of the text; returns what was held back."""
        return self._advance("", is_end=True)

    def parse(self, text: str) -> Message:
        """The message of a complete reply; call it on a new parser only."""
        return join_deltas([self._advance(text, is_end=True)])

    def _advance(self, text: str, *, is_end: bool) -> Delta:
        self._buffer += self._stop.cut(text, is_end=is_end)
        while self._parse_state(self, is_end or self.stop_string is not None):
            pass
        if is_end:
            self._end_content()
        delta = Delta(reasoning="".join(self._reasoning), content="".join(self._content), tool_calls=tuple(self._calls))
        self._reasoning, self._content, self._calls = [], [], []
        return delta

    @abstractmethod
    def _parse_start(self, is_end: bool) -> bool:
        """The initial state; True: the current state may find more in the buffer."""

    @abstractmethod
    def _end_content(self) -> None:
        """Add what only the end of the text decides."""

    def _add_call(self, call: ReadCall) -> None:
        """Add a call with the id that the model wrote, if it is valid and new, else with an own one."""
        call_id = call.call_id
        if call_id is None or len(call_id) != CALL_ID_LENGTH or not call_id.isalnum() or call_id in self._used_ids:
            call_id = self._new_call_id()
        self._used_ids.add(call_id)
        self._calls.append(ToolCall(call_id=call_id, name=call.name, arguments=call.arguments))

    def _parse_discarded(self, is_end: bool) -> bool:
        """Final state of a single-call reply: drop what the last token has after the call."""
        self._buffer = ""
        return False


class StopStrings:
    """The text before the first stop string, with `keeps_stop` up to its end; a suffix that may be the start of one is
    held back."""

    def __init__(self, stop: Sequence[str], *, keeps_stop: bool = False) -> None:
        self.found: str | None = None
        """The stop string that was found; later text is ignored."""
        self._stop = tuple(text for text in stop if text)
        self._keeps_stop = keeps_stop
        self._held = ""

    def cut(self, text: str, *, is_end: bool) -> str:
        """The next text, up to the first stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        self._held = ""
        found = [(index + len(stop), index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:  # the one that is complete first, which does not depend on how the text was cut into pieces
            end, start, self.found = min(found)
            return text[: end if self._keeps_stop else start]
        if not is_end:
            num_held = max((count_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return text


def count_overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
