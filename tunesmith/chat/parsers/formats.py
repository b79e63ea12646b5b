"""The formats of reasoning and tool calls by name: the values of `model.reasoning_parser` and `model.tool_call_parser`.

Harmony, the format of gpt-oss, holds reasoning, content and calls in messages of their own and has its own parser.
"""

from __future__ import annotations

from importlib import import_module

from tunesmith.chat.parsers.call_format import CallFormat
from tunesmith.chat.parsers.harmony import HARMONY
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.chat.parsers.reply import THINK, ReasoningTags
from tunesmith.config.model import CALL_FORMATS as PLACES

REASONING_TAGS = {
    "deepseek_r1": THINK,
    "mistral": ReasoningTags(opening="[THINK]", closing="[/THINK]"),
}


def load_call_format(name: str, place: str) -> CallFormat:
    """The format of a name, from `module:attribute` below this package."""
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"{__package__}.{module}"), attribute)
    assert isinstance(found, CallFormat) and found.name == name, f"{place} is the format {name!r}"
    return found


CALL_FORMATS = {name: load_call_format(name, place) for name, place in PLACES.items()}
"""Formats in the order in which a chat template's calls are tried."""


def find_call_format(template: str) -> CallFormat:
    """The format of calls by a chat template's source alone, for readers that cannot render it; else `HERMES`.

    The endpoint renders a probe call instead (`call_probe`).
    """
    formats = (each for each in CALL_FORMATS.values() if any(tag in template for tag in each.template_tags))
    return next(formats, HERMES)


def find_reasoning_parser(template: str) -> str:
    """The reasoning parser for a chat template's source: the one whose tags it contains, else `deepseek_r1`."""
    if HARMONY.openers[0] in template:
        return HARMONY.name
    return "mistral" if REASONING_TAGS["mistral"].closing in template else "deepseek_r1"
