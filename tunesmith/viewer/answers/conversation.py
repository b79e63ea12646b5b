"""A trajectory as conversations: its tokens split at the chat template's control tokens.

Each chain of turns that extend each other is one conversation; retries, sub-agents and edited histories are further
ones. Sampled text is parsed as the endpoint parses it. Only control *tokens* start a message: text that spells one is
text of the message it is in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from tunesmith.chat.parsers import parse_reply
from tunesmith.types import Turn
from tunesmith.viewer.reading.run import StoredRollout
from tunesmith.viewer.reading.token_text import CLOSE, OPEN, ReplyFormat, TokenText

MARK = f"{OPEN}(?:{{}}){CLOSE}"
ROLE = r"([a-zA-Z_]+)"
HEADERS = (
    MARK.format(r"<\|im_start\|>|<start_of_turn>") + ROLE + r"\n?",  # ChatML, Gemma
    MARK.format(r"<\|start_header_id\|>") + ROLE + MARK.format(r"<\|end_header_id\|>") + r"\s*",  # Llama 3
    MARK.format(r"<\|start\|>")
    + r"([^\x02]*)"
    + f"(?:{MARK.format(r'<.channel.>')}[^\x02]*)?"
    + MARK.format(r"<\|message\|>"),
    MARK.format(r"<\|(system|user|assistant|tool|observation)\|>") + r"\n?",  # Phi, GLM
    MARK.format(r"<.(User|Assistant).>"),  # DeepSeek
    MARK.format(r"\[(INST|/INST|AVAILABLE_TOOLS|TOOL_RESULTS)\]"),  # Mistral
)
HEADER = re.compile("|".join(f"(?:{header})" for header in HEADERS))
CONTROL = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
ROLES = {"model": "assistant", "inst": "user", "/inst": "assistant", "observation": "tool", "tool_results": "tool"}
ROLES |= {"available_tools": "system", "developer": "system", "ipython": "tool"}


def build_conversations(stored: StoredRollout, text: TokenText) -> list[dict[str, Any]]:
    """The conversations of a trajectory: messages in order, with the numbers of the turn that sampled them."""
    conversations = []
    for turns in stored.iter_chains():
        messages: list[dict[str, Any]] = []
        known: tuple[int, ...] = ()
        for number, turn, advantage in turns:
            messages += split_messages(text.decode_marked(turn.prompt_ids[len(known) :]), text.reply_format)
            if messages and messages[-1]["role"] == "assistant" and not messages[-1]["content"].strip():
                messages.pop()  # the header of the reply
            messages.append(describe_reply(number, turn, advantage, text))
            known = turn.prompt_ids + turn.sampled_ids
        shown = [each for each in messages if each.get("sampled") or each["content"].strip() or each.get("tool_calls")]
        conversations.append({"messages": shown})
    return conversations


def describe_reply(number: int, turn: Turn, advantage: float | None, text: TokenText) -> dict[str, Any]:
    """The message that a turn sampled."""
    prompt_end, tags = text.decode_marked(turn.prompt_ids[-8:]), text.reply_format.tags
    last = prompt_end.rpartition(tags.opening)[2]
    is_open = last != prompt_end and tags.closing not in last
    sampled = drop_controls(text.decode_marked(turn.sampled_ids), text.reply_format)
    return describe_text(sampled, text.reply_format, is_reasoning_open=is_open) | {
        "sampled": True,
        "turn": number,
        "stop_reason": turn.stop_reason,
        "num_tokens": len(turn.sampled_ids),
        "logprob": fmean(turn.logprobs) if turn.logprobs else None,
        "advantage": advantage,
        "trained": advantage is not None,
        "versions": sorted(set(turn.policy_versions)),
    }


def split_messages(marked: str, reply_format: ReplyFormat = ReplyFormat()) -> list[dict[str, Any]]:
    """Messages of a rendered prompt; text before the first header, or without any, is one message of role `prompt`."""
    headers = list(HEADER.finditer(marked))
    messages = []
    if before := drop_controls(marked[: headers[0].start()] if headers else marked, reply_format).strip():
        messages.append({"role": "prompt", "content": before})
    ends = [*(header.start() for header in headers[1:]), len(marked)]
    for header, end in zip(headers, ends, strict=False):  # without headers there is one end
        name = next((group for group in header.groups() if group), "prompt").strip().lower()
        role = ROLES.get(name, name)
        content = drop_controls(marked[header.end() : end], reply_format).removesuffix("\n")
        is_reply = role == "assistant"
        messages.append(describe_text(content, reply_format) if is_reply else {"role": role, "content": content})
    return messages


def describe_text(content: str, reply_format: ReplyFormat, *, is_reasoning_open: bool = False) -> dict[str, Any]:
    """An assistant's text as reasoning, content and tool calls."""
    message = parse_reply(
        content, reply_format.call_format, is_reasoning_open=is_reasoning_open, reasoning_tags=reply_format.tags
    )
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"role": "assistant", "content": message.content, "reasoning": message.reasoning, "tool_calls": calls}


def drop_controls(marked: str, reply_format: ReplyFormat) -> str:
    """The text without control tokens, except those that delimit reasoning and tool calls."""
    shown = reply_format.shown_controls
    return CONTROL.sub(lambda found: found[1] if found[1] in shown else "", marked)


def list_tool_names(replies: Sequence[str], reply_format: ReplyFormat) -> list[str]:
    """Names of the tools that sampled replies call."""
    calls = (describe_text(reply, reply_format)["tool_calls"] for reply in replies if reply_format.may_call(reply))
    return [call["name"] for call in chain(*calls)]


def format_conversation(conversation: dict[str, Any]) -> str:
    """A conversation as plain text, for comparing two."""
    parts = []
    for message in conversation["messages"]:
        lines = [f"[{message['role']}]"]
        lines += [f"(reasoning) {message['reasoning']}"] if message.get("reasoning") else []
        lines += [message["content"]] if message["content"] else []
        lines += [f"{call['name']}({call['arguments']})" for call in message.get("tool_calls") or ()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
