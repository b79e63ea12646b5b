"""Creates the response of one admitted /v1/completions request: client-rendered prompts, unparsed text.

Each prompt is a separate call of the session, and each of its choices a recorded turn, as for chat requests. The text
is not parsed for reasoning or tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.chat.messages import Message
from tunesmith.chat.parsers import Delta, ReplyParser
from tunesmith.rollout.openai_server.chat_completion import PendingCompletion
from tunesmith.rollout.openai_server.request import TextRequest
from tunesmith.rollout.openai_server.response import TokenLogprobs, build_text_logprobs


class PendingTextCompletion(PendingCompletion[TextRequest]):
    """An admitted completion request."""

    id_prefix, body_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def build_parser(self) -> ReplyParser:
        """A parser that only truncates the text at stop strings."""
        return ReplyParser(new_call_id=str, has_reasoning=False, has_tool_calls=False, stop=self.request.sampling.stop)

    def build_message(self, message: Message) -> dict[str, Any]:
        return {"text": message.content}

    def build_delta(self, delta: Delta, *, num_calls: int, is_first: bool) -> dict[str, Any]:
        return {"text": delta.content}

    def build_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        has_top = self.request.sampling.top_logprobs > 0
        return build_text_logprobs(tokens, self.renderer.format_token, has_top=has_top)
