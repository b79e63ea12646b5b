"""How the run's model writes reasoning and tool calls: as its config says, or as its chat template shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.chat.parsers import (
    CALL_FORMATS,
    HERMES,
    REASONING_TAGS,
    THINK,
    CallFormat,
    ReasoningTags,
    find_call_format,
    find_reasoning_parser,
)

ALWAYS_SHOWN = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """The formats of one model's replies."""

    call_format: CallFormat = HERMES
    tags: ReasoningTags = THINK

    @property
    def shown_controls(self) -> frozenset[str]:
        """Control tokens that the parser reads."""
        return ALWAYS_SHOWN | {self.tags.opening, self.tags.closing, *self.call_format.markup}

    def may_call(self, text: str) -> bool:
        """Whether a reply contains the start of a tool call."""
        return any(opener in text for opener in (*self.call_format.openers, *self.call_format.first_openers))


def find_reply_format(folder: Path, config: Mapping[str, Any]) -> ReplyFormat:
    """The formats of a run, whose tokenizer is in `folder`."""
    model = config.get("model")
    given = model if isinstance(model, dict) else {}
    template = read_template(folder)
    named = CALL_FORMATS.get(str(given.get("tool_call_parser")))
    reasoning = given.get("reasoning_parser", "auto")
    if reasoning == "auto":
        reasoning = find_reasoning_parser(template)
    return ReplyFormat(call_format=named or find_call_format(template), tags=REASONING_TAGS.get(str(reasoning), THINK))


def read_template(folder: Path) -> str:
    """The source of the chat template that is saved with a tokenizer; empty if there is none."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        pass
    try:
        saved = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    template = saved.get("chat_template") if isinstance(saved, dict) else None
    return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False) if template else ""
