"""Tool calls of DeepSeek, between tokens of its own.

V3 and R1 write `function`, the name, and the arguments in a fenced block; V3.1 writes the name and bare arguments.
"""

from __future__ import annotations

import re

from tunesmith.chat.parsers.call_format import NAME_PATTERN, Block, CallFormat, ReadCall, Tools, find_close, parse_call

CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"

_FENCED = re.compile(rf"\s*function{SEPARATOR}\s*({NAME_PATTERN})\s*```json(.*)```\s*", re.DOTALL)
_BARE = re.compile(rf"\s*({NAME_PATTERN})\s*{SEPARATOR}(.*)", re.DOTALL)


def read_deepseek(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    """A list of calls; at the end of the reply its closing tokens may be missing."""
    ends = find_close(text, CALLS_END, len(CALLS_BEGIN), is_end=is_end)
    if ends is None:
        return None
    body_end, length = ends
    calls = _read_calls(text[len(CALLS_BEGIN) : body_end])
    return Block(length=length if calls else len(CALLS_BEGIN), calls=calls)


def _read_calls(body: str) -> tuple[ReadCall, ...]:
    """The calls between the outer tokens; empty if one is malformed."""
    before, *parts = body.split(CALL_BEGIN)
    calls = []
    for part in parts:
        call_text, _, after = part.partition(CALL_END)
        found = _FENCED.fullmatch(call_text) or _BARE.fullmatch(call_text)
        call = None if found is None or after.strip() else parse_call(found.group(1), found.group(2))
        if call is None:
            return ()
        calls.append(call)
    return () if before.strip() else tuple(calls)


DEEPSEEK = CallFormat(
    name="deepseek",
    openers=(CALLS_BEGIN,),
    template_tags=(CALLS_BEGIN,),
    close=CALL_END,
    markup=(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    read_block=read_deepseek,
)
