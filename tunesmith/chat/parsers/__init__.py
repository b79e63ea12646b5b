"""Parsers of sampled replies: reasoning, content and tool calls in the formats that open models write.

Formats have names, the values of `model.reasoning_parser` and `model.tool_call_parser`. Harmony, the format of gpt-oss,
holds reasoning, content and calls in messages of their own and has its own parser.
"""

from typing import Any

from tunesmith.chat.messages import Message
from tunesmith.chat.parsers.call_format import CallFormat
from tunesmith.chat.parsers.deepseek import DEEPSEEK
from tunesmith.chat.parsers.harmony import HARMONY, HarmonyParser
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.chat.parsers.json_calls import JSON, LLAMA3, MISTRAL
from tunesmith.chat.parsers.reply import THINK, ReasoningTags, ReplyParser
from tunesmith.chat.parsers.xml_calls import GLM, QWEN3_CODER

REASONING_TAGS = {"deepseek_r1": THINK, "mistral": ReasoningTags(opening="[THINK]", closing="[/THINK]")}


CALL_FORMATS = {each.name: each for each in (HARMONY, DEEPSEEK, MISTRAL, QWEN3_CODER, GLM, HERMES, LLAMA3, JSON)}
"""Formats in the order in which a chat template's calls are tried: Qwen3-Coder and GLM write Hermes' outer tag too, and
Llama's calls have no tags. No template asks for `json`, so it is not tried."""


def find_call_format(template: str) -> CallFormat:
    """The format of calls by a chat template's source alone, for readers that cannot render it; else `HERMES`.

    The endpoint renders a probe call instead (`call_probe`).
    """
    formats = (each for each in CALL_FORMATS.values() if any(tag in template for tag in each.template_tags))
    return next(formats, HERMES)


def parse_reply(text: str, call_format: CallFormat, *, has_reasoning: bool = True, **details: Any) -> Message:
    """A whole reply without a request; `details` are arguments of `ReplyParser`."""
    if call_format is HARMONY:
        return HarmonyParser(new_call_id=str, has_tool_calls=True).parse(text)
    parser = ReplyParser(
        new_call_id=str, has_reasoning=has_reasoning, has_tool_calls=True, call_format=call_format, **details
    )
    return parser.parse(text)


def find_reasoning_parser(template: str) -> str:
    """The reasoning parser for a chat template's source: the one whose tags it contains, else `deepseek_r1`."""
    if HARMONY.openers[0] in template:
        return HARMONY.name
    return "mistral" if REASONING_TAGS["mistral"].closing in template else "deepseek_r1"
