"""Fast rendering of a tokenizer's chat template.

`apply_chat_template` copies and validates its whole input at every call, which costs more than the template itself.
Messages parsed from JSON do not need that, so the template compiled by transformers is rendered directly. This is used
only if both give the same text for probe conversations with every kind of message; else the tokenizer renders.
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
"""Compiled templates cached; a tokenizer may have a separate template for requests with tools."""
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
    """Renders messages in the form of `Message.to_template`; raises the same errors as `apply_chat_template`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokenizer_parameters = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        """Parameters of `apply_chat_template`, which do not reach the template as variables."""
        self._compile_cached = functools.lru_cache(maxsize=NUM_TEMPLATES)(self._compile)
        self.is_direct = hasattr(chat_template_utils, "_compile_jinja_template") and all(
            self._is_same(messages, tools) for messages in PROBES for tools in ((), (PROBE_TOOL,))
        )
        """Whether the compiled template is rendered directly."""

    def is_rendered_from_neighbors(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template for requests with these tools renders each message from neighboring messages only."""
        return self.is_direct and self._compile_cached(self._tokenizer.get_chat_template(None, list(tools) or None))[2]

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        if self.is_direct and self._tokenizer_parameters.isdisjoint(variables):
            return self._render_directly(messages, tools, variables, has_generation_prompt)
        return self._render_by_tokenizer(messages, tools, variables, has_generation_prompt)

    def _render_directly(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        tools_or_none = list(tools) or None
        template, names, _ = self._compile_cached(self._tokenizer.get_chat_template(None, tools_or_none))
        request = {
            "messages": messages,
            "tools": tools_or_none,
            "documents": None,
            "add_generation_prompt": has_generation_prompt,
        }
        context = {**names, **request, **self._tokenizer.special_tokens_map, **variables}
        return "".join(template.root_render_func(template.new_context(context, shared=True)))

    def _compile(self, source: str) -> tuple[Template, Mapping[str, Any], bool]:
        """The compiled template, its global names, and whether it renders from neighboring messages only."""
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
        """Whether both ways of rendering give the same text, or raise the same error."""
        results = []
        for render in (self._render_by_tokenizer, self._render_directly):
            try:
                results.append(render(messages, tools, {}, True))
            except (AttributeError, KeyError, TypeError, ValueError, TemplateError) as error:
                results.append(repr(error))
        return results[0] == results[1]
