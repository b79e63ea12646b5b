"""Cuts a text at the first stop string, given in any pieces."""

from __future__ import annotations

from collections.abc import Sequence


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
        """The next text, which ends at the first stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        self._held = ""
        found = [(index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            index, self.found = min(found, key=lambda each: each[0])
            return text[: index + len(self.found) * self._keeps_stop]
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
