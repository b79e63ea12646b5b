"""How a chat template writes a tool call: its format, and the text around the name and the arguments.

Input: the text of one rendered call with known name, id and arguments, from the start of the reply on. The format is
the one whose parser reads exactly that call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tunesmith.chat.parsers import parse_reply
from tunesmith.chat.parsers.call_format import CallFormat
from tunesmith.chat.parsers.harmony import HARMONY

SENTINEL = "zqxjkvbpYw"
"""Argument of the probe; its position shows where the arguments end."""
PROBE = "probe_qzx"
"""Name of the probe's function."""
PROBE_CALL_ID = "call00000"
JSON_END = '"}'
"""What follows the last argument if the arguments are JSON."""
NAME_EXAMPLE, ARGUMENTS_EXAMPLE = "<function-name>", "<args-json-object>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedCall:
    """How a template writes a tool call."""

    call_format: CallFormat
    start: str
    """Text before the function's name."""
    middle: str
    """Text between the name and the arguments, without the space that the model may write differently; if there is
    none, the first character of the arguments, which ends the name."""
    separator: str
    """`middle` without a part of the arguments."""
    argument: tuple[str, str, str] | None
    """Texts before the name of an argument, between name and value, and after the value; None if they are JSON."""
    tail: str
    """Text from the end of the last string argument to the token that ends the turn."""
    example: str
    """A call with placeholders for the name and the arguments, to describe the format."""


def find_rendered_call(text: str, call_format: CallFormat, *, turn_ends: re.Pattern[str]) -> RenderedCall | None:
    """How the rendered call is written, if it is in this format; else None.

    `text` may start with the header of the reply and continues after it; `turn_ends` are the special tokens that are
    not part of a call.
    """
    position = text.find(PROBE)
    end = text.find(SENTINEL)
    if not 0 <= position < end:
        return None
    after = end + len(SENTINEL)
    found = turn_ends.search(text, after)
    reply_end = len(text) if found is None else found.start()
    start = _find_start(text[:position], call_format)
    if start is None:
        return None
    calls = parse_reply(text[start:reply_end], call_format, has_reasoning=False).tool_calls
    if [(call.name, json.loads(call.arguments)) for call in calls] != [(PROBE, {"a": SENTINEL})]:
        return None
    arguments = re.search(call_format.arguments_start, text[position:end])
    if arguments is None:
        return None
    middle = text[position + len(PROBE) : position + arguments.start()]
    first = text[position + arguments.start()]
    arguments_end = after + len(JSON_END) if text.startswith(JSON_END, after) else after
    return RenderedCall(
        call_format=call_format,
        start=text[start:position],
        middle=middle.rstrip() or middle or first,
        separator=middle.rstrip() or middle,
        argument=_find_argument_texts(text[position + arguments.start() : end], text[after:reply_end], call_format),
        tail=text[after:reply_end],
        example=f"{text[start:position]}{NAME_EXAMPLE}{middle}{ARGUMENTS_EXAMPLE}{text[arguments_end:reply_end]}",
    )


def _find_argument_texts(argument: str, tail: str, call_format: CallFormat) -> tuple[str, str, str] | None:
    """The texts around the name `a` and the value of an argument that is followed by `tail`."""
    if not call_format.argument_ends:
        return None
    found = re.fullmatch(r"(.*?)\ba\b(.*)", argument, re.DOTALL)
    close = call_format.argument_ends[0]
    assert found is not None
    return found.group(1), found.group(2), tail[: tail.index(close) + len(close)]


def _find_start(text: str, call_format: CallFormat) -> int | None:
    """Where the block of calls starts, of which `text` is the part before the name."""
    if call_format is HARMONY:
        return max(text.rfind(" to="), text.rfind("<|channel|>")) if "to=" in text else None
    starts = map(text.rfind, (*call_format.openers, *call_format.first_openers))
    return next((index for index in starts if index >= 0), None)
