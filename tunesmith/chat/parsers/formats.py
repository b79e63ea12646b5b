"""The formats of reasoning and tool calls by name: the values of `model.reasoning_parser` and `model.tool_call_parser`.

Harmony, the format of gpt-oss, holds reasoning, content and calls in messages of their own and has its own parser.
"""

from __future__ import annotations

from tunesmith.chat.parsers.deepseek import DEEPSEEK
from tunesmith.chat.parsers.harmony import HARMONY
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.chat.parsers.json_calls import LLAMA3, MISTRAL
from tunesmith.chat.parsers.reply import THINK, ReasoningTags
from tunesmith.chat.parsers.xml_calls import GLM, QWEN3_CODER

CALL_FORMATS = {each.name: each for each in (HERMES, QWEN3_CODER, GLM, MISTRAL, DEEPSEEK, HARMONY, LLAMA3)}
"""Formats in the order in which a chat template's calls are tried; Llama's, which has no tags, is last."""

REASONING_TAGS = {
    "deepseek_r1": THINK,
    "mistral": ReasoningTags(opening="[THINK]", closing="[/THINK]"),
}


def find_reasoning_parser(template: str) -> str:
    """The reasoning parser for a chat template's source: the one whose tags it contains, else `deepseek_r1`."""
    if HARMONY.openers[0] in template:
        return HARMONY.name
    return "mistral" if REASONING_TAGS["mistral"].closing in template else "deepseek_r1"
