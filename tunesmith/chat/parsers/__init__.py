"""Parsers of sampled replies: reasoning, content and tool calls in the formats that open models write."""

from tunesmith.chat.parsers.call_format import CallFormat
from tunesmith.chat.parsers.formats import CALL_FORMATS, REASONING_TAGS, find_call_format, find_reasoning_parser
from tunesmith.chat.parsers.harmony import HARMONY, HarmonyParser
from tunesmith.chat.parsers.hermes import CALL_CLOSE, CALL_OPEN, HERMES
from tunesmith.chat.parsers.incremental import Delta, IncrementalParser, join_deltas
from tunesmith.chat.parsers.json_calls import MISTRAL
from tunesmith.chat.parsers.reply import THINK, THINK_CLOSE, THINK_OPEN, ReasoningTags, ReplyParser

__all__ = [
    "CALL_CLOSE",
    "CALL_FORMATS",
    "CALL_OPEN",
    "HARMONY",
    "HERMES",
    "MISTRAL",
    "REASONING_TAGS",
    "THINK",
    "THINK_CLOSE",
    "THINK_OPEN",
    "CallFormat",
    "Delta",
    "HarmonyParser",
    "IncrementalParser",
    "ReasoningTags",
    "ReplyParser",
    "find_call_format",
    "find_reasoning_parser",
    "join_deltas",
]
