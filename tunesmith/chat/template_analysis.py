"""Static check whether a chat template renders each message from neighboring messages only.

The template must have one loop over the messages, keep no state between iterations, and access only the current, the
first, the previous and the next message. Then the text after a reply does not depend on the earlier conversation, so
it can be rendered without it. The check is conservative: an unknown construct counts as dependent.
"""

from __future__ import annotations

from typing import Literal

from jinja2 import nodes

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
