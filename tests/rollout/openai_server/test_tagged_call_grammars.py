"""Grammars of calls with a tag for each argument: what they allow is read back as valid arguments."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken

import call_templates as families
from call_templates import build_family_tokenizer
from tunesmith.chat.messages import parse_tools
from tunesmith.chat.renderer import Renderer
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.rollout.openai_server.constraints import (
    constrain_call,
    constrain_choice,
    constrain_reply,
)
from tunesmith.rollout.openai_server.fields import RequestError

pytest.importorskip("llguidance")
GLM_46 = families.GLM.replace("call.function.name + '\\n' }}", "call.function.name }}").replace(
    "'</arg_key>\\n<arg_value>'", "'</arg_key><arg_value>'"
)
"""Without line breaks between the tags."""
TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FAMILIES = {
    "qwen3_coder": (families.QWEN3_CODER, "<|im_end|>", TAGS[:2]),
    "glm": (families.GLM, "<|observation|>", TAGS),
    "glm, tags as text": (families.GLM, "<|observation|>", ()),
    "glm without line breaks": (GLM_46, "<|observation|>", TAGS),
}
"""Template, the token that ends a call, and the tags that are one token."""


class Family:
    def __init__(self, template: str, end: str, tokens: tuple[str, ...]) -> None:
        tokenizer = build_family_tokenizer(template, eos_token=end)
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens])
        self.renderer = Renderer(tokenizer)
        self.eos_id = tokenizer.convert_tokens_to_ids(end)
        self.compiler = GrammarCompiler(tokenizer, vocab_size=len(tokenizer), eos_ids=[self.eos_id])
        assert self.renderer.rendered_call.argument is not None
        self._start, self._middle, self._end = self.renderer.rendered_call.argument

    def write(self, *arguments: tuple[str, str]) -> str:
        """The rest of a call of `f` after its name, with texts as values."""
        call = self.renderer.rendered_call
        parts = [f"{self._start}{name}{self._middle}{text}{self._end}\n" for name, text in arguments]
        return "\n" * (call.separator == ">") + "".join(parts) + call.tail.removeprefix(self._end).lstrip("\n")

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self.compiler.open(grammar)
        try:
            for token_id in (*self.renderer.encode(text), self.eos_id):
                matcher.accept(token_id)
        except ValueError:
            return False
        return True

    def constrain(self, parameters: Any, *, is_strict: bool = True, name: str | None = "f") -> str:
        tool = {"function": {"name": "f", "parameters": parameters, "strict": is_strict}}
        return constrain_call([tool], self.renderer, name=name, is_single_call=True)

    def read(self, parameters: Any, rest: str) -> dict[str, Any] | None:
        """The arguments that the parser reads; None if there is no call."""
        prefix, _ = self.renderer.build_call_prefix("f", (), has_grammar=True)
        tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        parser = self.renderer.build_parser((), new_call_id=str, has_tools=True, prefix=prefix, tools=tools)
        calls = parser.parse(rest).tool_calls
        return json.loads(calls[0].arguments) if calls else None


FAMILY_OF = {name: Family(*each) for name, each in FAMILIES.items()}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILY_OF[request.param]


def build_schema(properties: dict[str, Any], *required: str, **rest: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **rest}


COLOR = {"$defs": {"Color": {"enum": ["red", "1"], "type": "string"}}}
VALUES: list[tuple[dict[str, Any], dict[str, Any], list[str], list[str]]] = [
    ({"type": "string"}, {}, ["", "a", "3", "null", "\n x \n", '"q"', "a < b & é", "</parameter", "{}"], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, {}, ["ab", "\n\n\n"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a/[0-9]+$"}, {}, ["a/12"], ["a/", "xa/1", "a/1x"]),
    ({"type": "string", "pattern": "b"}, {}, ["abc", "b"], ["ac"]),
    ({"type": "string", "pattern": "^(b|[|)]c)$"}, {}, ["b", "|c", ")c"], ["bc", "ab"]),
    ({"type": "string", "enum": ["x y", "3"]}, {}, ["x y", "3"], ["x", '"3"']),
    ({"enum": ["x", 3, None, True]}, {}, ["x", "3", "null", "true"], ["4", "True "]),
    ({"const": "5"}, {}, ["5"], ["6"]),
    ({"$ref": "#/$defs/Color"}, COLOR, ["red", "1"], ["blue", "2"]),
    ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, COLOR, ["red", "1", "null"], ["blue", "None"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {}, ["a", "null", "nul", "null a"], [" null", "None"]),
    ({"type": ["string", "integer"]}, {}, ["a", "3", "-12", "3 a"], [" 3", "03"]),
    ({"type": "integer", "minimum": 3}, {}, ["3", "12"], ["2", "a", "3.5", '"3"']),
    ({"type": "number"}, {}, ["3", "-1.5e3"], ["a"]),
    ({"type": "boolean"}, {}, ["true", "false"], ["yes"]),
    ({"type": "array", "items": {"type": "integer"}}, {}, ["[]", "[1, 2]"], ['["a"]', "1"]),
    ({"type": "object", "properties": {"b": {"$ref": "#/$defs/Color"}}, "additionalProperties": False}, COLOR,
     ["{}", '{"b": "red"}'], ['{"b": "blue"}', '{"c": 1}']),
    ({}, {}, ["a", "3", "[1]"], []),
]  # fmt: skip
"""Schema of a parameter, definitions, texts that the grammar allows, and others."""


@pytest.mark.parametrize(("schema", "definitions", "good", "bad"), VALUES, ids=lambda value: json.dumps(value)[:40])
def test_a_value_is_written_as_the_parser_reads_it(
    family: Family, schema: dict[str, Any], definitions: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    parameters = build_schema({"a": schema}, "a", **definitions)
    grammar = family.constrain(parameters)
    for text in good:
        rest = family.write(("a", text))
        assert family.accepts(grammar, rest), text
        arguments = family.read(parameters, rest)
        assert arguments is not None
        assert_valid(arguments["a"], schema, definitions)
        assert (text if isinstance(arguments["a"], str) else json.loads(text)) == arguments["a"]
    assert [text for text in bad if family.accepts(grammar, family.write(("a", text)))] == []


PIECES = ("<", "/", "</parameter>", "</arg_value>", "\n", " ", "3", "null", "true", "[", "1]", "a", "</tool_call>", "-")


@pytest.mark.parametrize("schema", [schema for schema, definitions, *_ in VALUES if not definitions], ids=str)
def test_whatever_the_grammar_allows_is_valid_under_the_schema(family: Family, schema: dict[str, Any]) -> None:
    parameters, rng = build_schema({"a": schema}, "a"), random.Random(0)
    grammar = family.constrain(parameters)
    for _ in range(25):
        rest = family.write(("a", "".join(rng.choices(PIECES, k=rng.randint(1, 4)))))
        if family.accepts(grammar, rest):
            arguments = family.read(parameters, rest)
            assert arguments is not None
            assert_valid(arguments["a"], schema, {})


def assert_valid(value: Any, schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator({**schema, **definitions}).validate(value)


def test_names_required_and_optional_arguments_come_from_the_schema(family: Family) -> None:
    schema = build_schema({"a": {"type": "integer"}, "b": {"type": "string"}, "c": False}, "a")
    grammar = family.constrain(schema)
    assert family.accepts(grammar, family.write(("a", "1")))
    assert family.accepts(grammar, family.write(("a", "1"), ("b", "x")))
    for arguments in ([], [("b", "x")], [("d", "x")], [("a", "1"), ("d", "2")], [("a", "1"), ("a", "1")]):
        assert not family.accepts(grammar, family.write(*arguments))
    assert family.accepts(family.constrain(build_schema({})), family.write())
    assert not family.accepts(family.constrain(build_schema({})), family.write(("a", "1")))
    for free in (None, {"type": "object"}):
        assert family.accepts(family.constrain(free), family.write(("a", "1"), ("b", "x")))
        assert family.accepts(family.constrain(free), family.write())
    closed = {"type": "object", "additionalProperties": False}
    assert not family.accepts(family.constrain(closed), family.write(("a", "1")))
    unnamed = {"type": "object", "required": ["z"]}
    assert family.accepts(family.constrain(unnamed), family.write(("z", "x")))
    assert not family.accepts(family.constrain(unnamed), family.write())


def test_a_required_call_names_one_of_the_tools_and_may_be_repeated(family: Family) -> None:
    tools = [{"function": {"name": name, "parameters": build_schema({"a": {"type": "integer"}}, "a")}}
             for name in ("f", "find_all")]  # fmt: skip
    call = family.renderer.rendered_call
    body = call.separator + family.write(("a", "1")).lstrip("\n")
    grammar = constrain_call(tools, family.renderer, name=None, is_single_call=False)
    assert family.accepts(grammar, f"find_all{body}")
    assert family.accepts(grammar, f"f{body}\n{call.start}find_all{body}")
    assert not family.accepts(grammar, f"other{body}")
    single = constrain_call(tools, family.renderer, name=None, is_single_call=True)
    assert not family.accepts(single, f"f{body}\n{call.start}f{body}")
    constraint = constrain_choice(["yes"], "guided_choice")
    assert constraint is not None
    reply = constrain_reply(constraint, family.renderer, (), tools, is_single_call=False)
    assert family.accepts(reply, "yes")
    assert family.accepts(reply, f"{call.start}f{body}")
    assert not family.accepts(reply, "no")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, "type integer with keywords"),
        ({"minimum": 3}, "minimum"),
    ],
)
def test_keywords_that_text_cannot_be_held_to_are_refused_for_strict_tools_only(
    family: Family, schema: dict[str, Any], keyword: str
) -> None:
    parameters = build_schema({"a": schema}, "a")
    with pytest.raises(RequestError, match=keyword) as caught:
        family.constrain(parameters)
    assert caught.value.param == "tools"
    grammar = family.constrain(parameters, is_strict=False)
    assert family.accepts(grammar, family.write(("a", "b")))
    with pytest.raises(RequestError, match="minProperties"):
        family.constrain(build_schema({}, minProperties=1))


@pytest.mark.parametrize("pattern", ["^(?=a)b", "^a|b$", 3])
def test_patterns_that_cannot_be_enforced_are_refused(pattern: object) -> None:
    schema = build_schema({"a": {"type": "string", "pattern": pattern}}, "a")
    with pytest.raises(RequestError, match="pattern"):
        FAMILY_OF["glm"].constrain(schema, is_strict=False)


def test_names_that_the_format_cannot_write_are_refused(family: Family) -> None:
    with pytest.raises(RequestError, match="cannot write an argument named 'a>b'"):
        family.constrain(build_schema({"a>b": {}}, "a>b"), is_strict=False)
    with pytest.raises(RequestError, match="can write no value of the argument 'a'"):
        family.constrain(build_schema({"a": {"enum": ["</tool_call>"]}}, "a"), is_strict=False)


def test_a_forced_call_without_a_grammar_ends_its_name() -> None:
    renderer = FAMILY_OF["glm without line breaks"].renderer
    assert renderer.build_call_prefix("f", ())[0] == "<tool_call>f<"
