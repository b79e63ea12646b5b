"""Fast rendering of a tokenizer's chat template.

`apply_chat_template` copies and validates its whole input at every call, and that costs more than the template itself.
Messages parsed from JSON do not need that, so the template compiled by transformers is rendered directly. This is used
only if both give the same text for probe conversations with every kind of message; else the tokenizer renders.

A template that has one loop over the messages, keeps no state between iterations, and accesses only the current, the
first, the previous and the next message renders the text after a reply independently of the earlier conversation, so
that text can be rendered without it. The check of the syntax tree is conservative: an unknown construct counts as
dependent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.runtime import new_context
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from tunesmith.chat.parsers.call_format import Tools

MessageDicts = list[dict[str, Any]]
"""Messages in the form of `Message.to_template`."""
Variables = Mapping[str, Any]

NUM_TEMPLATES = 4
"""Compiled templates cached; a tokenizer may have a separate template for requests with tools."""
QUESTION = {"role": "user", "content": "q"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "\u20ac<"]}}}
PROBES: Sequence[MessageDicts] = (
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


IMPURE_NAMES = frozenset({"lipsum", "random", "strftime_now"})
"""Functions and filters of Jinja and transformers whose results change between calls."""


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

    def is_rendered_from_neighbors(self, tools: Tools) -> bool:
        """Whether the template for requests with these tools renders each message from neighboring messages only."""
        return self.is_direct and self._find_template(tools)[2]

    def is_pure(self, tools: Tools, variables: Variables) -> bool:
        """Whether the text depends on the arguments of `render` alone: not on the date, nor on a class of its own."""
        return self._is_rendered_directly(variables) and self._find_template(tools)[3]

    def render(self, messages: MessageDicts, tools: Tools, variables: Variables, has_generation_prompt: bool) -> str:
        render = self._render_directly if self._is_rendered_directly(variables) else self._render_by_tokenizer
        return render(messages, tools, variables, has_generation_prompt)

    def _is_rendered_directly(self, variables: Variables) -> bool:
        return self.is_direct and self._tokenizer_parameters.isdisjoint(variables)

    def _find_template(self, tools: Tools) -> tuple[Template, Mapping[str, Any], bool, bool]:
        return self._compile_cached(self._tokenizer.get_chat_template(None, list(tools) or None))

    def _render_directly(
        self, messages: MessageDicts, tools: Tools, variables: Variables, has_generation_prompt: bool
    ) -> str:
        template, names, *_ = self._find_template(tools)
        request = {
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": has_generation_prompt,
        }
        # not `template.new_context`, which makes a set of all global names for templates that import others
        context = new_context(
            template.environment, template.name, template.blocks, {**names, **request, **variables}, shared=True
        )
        return "".join(template.root_render_func(context))

    def _compile(self, source: str) -> tuple[Template, Mapping[str, Any], bool, bool]:
        """The compiled template, the names it knows, and whether it renders from neighboring messages only and calls
        only functions whose results do not change."""
        template = chat_template_utils._compile_jinja_template(source)
        tree = template.environment.parse(source)
        names = {**template.globals, **self._tokenizer.special_tokens_map}
        is_pure = IMPURE_NAMES.isdisjoint(node.name for node in tree.find_all((nodes.Name, nodes.Filter)))
        return template, names, is_rendered_from_neighbors(tree), is_pure

    def _render_by_tokenizer(
        self, messages: MessageDicts, tools: Tools, variables: Variables, has_generation_prompt: bool
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

    def _is_same(self, messages: MessageDicts, tools: Tools) -> bool:
        """Whether both ways of rendering give the same text, or raise the same error."""
        results = []
        for render in (self._render_by_tokenizer, self._render_directly):
            try:
                results.append(render(messages, tools, {}, True))
            except (AttributeError, KeyError, TypeError, ValueError, TemplateError) as error:
                results.append(repr(error))
        return results[0] == results[1]


MESSAGES, LOOP = "messages", "loop"
STATELESS_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Concat, nodes.Compare, nodes.Operand,
    nodes.Test, nodes.Assign, nodes.List, nodes.Tuple,
)  # fmt: skip
"""Nodes that depend on their children only; in Jinja, assignments inside a loop do not outlive the iteration."""
PURE_FILTERS = frozenset({"default", "first", "join", "last", "length", "lower", "string", "tojson", "trim", "upper"})

Place = Literal["outside", "message_loop", "inner_loop"]
"""Outside the loop over the messages, directly in it, or in another loop."""


def is_rendered_from_neighbors(template: nodes.Template) -> bool:
    """Whether the text after a message depends, of all earlier messages, on the first and the previous one only."""
    loops = [each for each in template.find_all(nodes.For) if _is_name(each.iter, MESSAGES)]
    return len(loops) == 1 and _is_independent(template, "outside")


def _is_independent(node: nodes.Node, place: Place) -> bool:
    if isinstance(node, nodes.For):
        return _is_independent_loop(node, place)
    if _is_neighbor_access(node, place):
        return True
    if isinstance(node, nodes.Name):
        return node.name != MESSAGES and (node.name != LOOP or (place == "inner_loop" and node.ctx == "load"))
    is_method = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr)
    is_filter = isinstance(node, nodes.Filter) and node.name in PURE_FILTERS
    is_stateless = is_method or is_filter or type(node) in STATELESS_NODES
    return is_stateless and _are_independent(node.iter_child_nodes(), place)


def _is_independent_loop(loop: nodes.For, place: Place) -> bool:
    is_over_messages = _is_name(loop.iter, MESSAGES)
    if loop.recursive or (is_over_messages and (place != "outside" or loop.test is not None)):
        return False
    outer = [loop.target, *loop.else_] if is_over_messages else [loop.target, loop.iter, *loop.else_]
    inner = loop.body if loop.test is None else [*loop.body, loop.test]
    inner_place: Place = "message_loop" if is_over_messages else "inner_loop"
    return _are_independent(outer, place) and _are_independent(inner, inner_place)


def _are_independent(parts: object, place: Place) -> bool:
    return all(_is_independent(part, place) for part in parts)  # type: ignore[attr-defined]


def _is_neighbor_access(node: nodes.Node, place: Place) -> bool:
    """Access to the first, previous or next message, or a test for the first or last iteration."""
    match node:
        case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=0)):
            return True
        case nodes.Getitem(
            node=nodes.Name(name="messages"),
            arg=nodes.Add(left=index, right=nodes.Const(value=1)) | nodes.Sub(left=index, right=nodes.Const(value=1)),
        ):
            return place == "message_loop" and _is_loop_index0(index)
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="first" | "last"):
            return place == "message_loop"
        case nodes.Compare(expr=index, ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value=0))]):
            return place == "message_loop" and _is_loop_index0(index)
    return False


def _is_loop_index0(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getattr) and _is_name(node.node, LOOP) and node.attr == "index0"


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name
