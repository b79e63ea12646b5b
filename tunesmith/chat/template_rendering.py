"""One rendering of a tokenizer's chat template.

`apply_chat_template` copies and checks all that a template may see at every call, which costs more than the template.
Messages from JSON need none of it: the template that transformers compiles is rendered as it is, wherever it gives the
same texts for conversations that hold each kind of message; else the tokenizer renders.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from tunesmith.chat.template_analysis import is_rendered_from_neighbors

NUM_TEMPLATES = 4
"""Compiled templates kept; a tokenizer may have one of its own for requests with tools."""
QUESTION = {"role": "user", "content": "q"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "\u20ac<"]}}}
PROBES: Sequence[list[dict[str, Any]]] = (
    [QUESTION],
    [{"role": "system", "content": "s"}, QUESTION, {"role": "assistant", "content": "a", "name": "n"}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "a", "reasoning_content": "r"}],
    [
        QUESTION,
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "t", "tool_call_id": "call00000", "name": "f"},
    ],
)
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}}},
}


class JinjaTemplate:
    """Renders messages in the form of `Message.to_template`; raises what the tokenizer's own rendering raises."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._options = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        """Names that the tokenizer does not hand on to the template."""
        self._prepare = functools.lru_cache(maxsize=NUM_TEMPLATES)(self._compile)
        self.is_direct = hasattr(chat_template_utils, "_compile_jinja_template") and all(
            self._is_same(messages, tools) for messages in PROBES for tools in ((), (PROBE_TOOL,))
        )
        """Whether the compiled template is rendered without the tokenizer."""

    def is_rendered_from_neighbors(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template of such a request writes each message by what stands next to it."""
        return self.is_direct and self._prepare(self._tokenizer.get_chat_template(None, list(tools) or None))[2]

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        if self.is_direct and self._options.isdisjoint(variables):
            return self._render_directly(messages, tools, variables, has_generation_prompt)
        return self._render_by_tokenizer(messages, tools, variables, has_generation_prompt)

    def _render_directly(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        given = list(tools) or None
        template, names, _ = self._prepare(self._tokenizer.get_chat_template(None, given))
        request = {
            "messages": messages,
            "tools": given,
            "documents": None,
            "add_generation_prompt": has_generation_prompt,
        }
        seen = {**names, **request, **self._tokenizer.special_tokens_map, **variables}
        return "".join(template.root_render_func(template.new_context(seen, shared=True)))

    def _compile(self, source: str) -> tuple[Template, Mapping[str, Any], bool]:
        """A template, the names that all its renderings know, and whether it is local."""
        template = chat_template_utils._compile_jinja_template(source)
        return template, dict(template.globals), is_rendered_from_neighbors(template.environment.parse(source))

    def _render_by_tokenizer(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=has_generation_prompt,
            **variables,
        )
        assert isinstance(text, str)
        return text

    def _is_same(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether both ways give the same text, or refuse the messages for the same reason."""
        results = []
        for render in (self._render_by_tokenizer, self._render_directly):
            try:
                results.append(render(messages, tools, {}, True))
            except (AttributeError, KeyError, TypeError, ValueError, TemplateError) as error:
                results.append(repr(error))
        return results[0] == results[1]
