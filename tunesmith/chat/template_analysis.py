"""Whether a chat template writes each message by what stands next to it.

A template that has one loop over the messages, carries nothing from one turn of it to the next, and looks at no other
message than the first, the one before and the one after, writes the same after a reply however long the conversation
before it is. Whatever is not known to be so is taken not to be.
"""

from __future__ import annotations

from typing import Literal

from jinja2 import nodes

MESSAGES, LOOP = "messages", "loop"
PLAIN_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Add, nodes.Concat, nodes.Compare, nodes.Operand,
    nodes.Test, nodes.Assign, nodes.List, nodes.Tuple,
)  # fmt: skip
"""What computes on its parts alone; assignments in a loop end with its turn."""
PURE_FILTERS = frozenset({"default", "first", "join", "last", "length", "lower", "string", "tojson", "trim", "upper"})

Place = Literal["outside", "turn", "inner"]
"""Outside of the loop over the messages, in it, or in a loop within either."""


def is_rendered_from_neighbors(template: nodes.Template) -> bool:
    """Whether what is written after a message depends on nothing before it but the first message and the last."""
    loops = [each for each in template.find_all(nodes.For) if _is_name(each.iter, MESSAGES)]
    return len(loops) == 1 and _is_known(template, "outside")


def _is_known(node: nodes.Node, place: Place) -> bool:
    if isinstance(node, nodes.For):
        return _is_local_loop(node, place)
    if _is_near(node, place):
        return True
    if isinstance(node, nodes.Name):
        return node.name != MESSAGES and (node.name != LOOP or (place == "inner" and node.ctx == "load"))
    is_method = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr)
    is_filter = isinstance(node, nodes.Filter) and node.name in PURE_FILTERS
    return (is_method or is_filter or type(node) in PLAIN_NODES) and _are_local(node.iter_child_nodes(), place)


def _is_local_loop(loop: nodes.For, place: Place) -> bool:
    is_over_messages = _is_name(loop.iter, MESSAGES)
    if loop.recursive or (is_over_messages and (place != "outside" or loop.test is not None)):
        return False
    around = [loop.target, *loop.else_] if is_over_messages else [loop.target, loop.iter, *loop.else_]
    within = loop.body if loop.test is None else [*loop.body, loop.test]
    return _are_local(around, place) and _are_local(within, "turn" if is_over_messages else "inner")


def _are_local(parts: object, place: Place) -> bool:
    return all(_is_known(part, place) for part in parts)  # type: ignore[attr-defined]


def _is_near(node: nodes.Node, place: Place) -> bool:
    """The first message, the one before or after this turn's, or whether the turn is the first or the last."""
    match node:
        case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=0)):
            return True
        case nodes.Getitem(
            node=nodes.Name(name="messages"),
            arg=nodes.Add(left=index, right=nodes.Const(value=1)) | nodes.Sub(left=index, right=nodes.Const(value=1)),
        ):
            return place == "turn" and _is_index(index)
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="first" | "last"):
            return place == "turn"
        case nodes.Compare(expr=index, ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const(value=0))]):
            return place == "turn" and _is_index(index)
    return False


def _is_index(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getattr) and _is_name(node.node, LOOP) and node.attr == "index0"


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name
