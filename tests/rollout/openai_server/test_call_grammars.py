"""Grammars of tool calls in the formats of model families: they accept what the template writes, and nothing else."""

from __future__ import annotations

import json

import pytest

import call_templates as families
from call_templates import build_family_tokenizer
from chat_templates import LLAMA3, QWEN25
from tunesmith.chat.renderer import Renderer
from tunesmith.grammar.matcher import GrammarCompiler, TokenMatcher
from tunesmith.rollout.openai_server.constraints import (
    constrain_call,
    constrain_choice,
    constrain_reply,
)

pytest.importorskip("llguidance")
PARAMETERS = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "find_all")]
JSON_FAMILIES = {
    "hermes": (QWEN25, "<|im_end|>"),
    "mistral list": (families.MISTRAL_LIST, "</s>"),
    "mistral args": (families.MISTRAL_ARGS, "</s>"),
    "mistral name": (families.MISTRAL_NAME, "</s>"),
    "deepseek v3": (families.DEEPSEEK_V3, families._DS["end_of_sentence"]),
    "deepseek v3.1": (families.DEEPSEEK_V31, families._DS["end_of_sentence"]),
    "llama3_json": (LLAMA3, "<|eot_id|>"),
    "harmony": (families.HARMONY, "<|call|>"),
}
"""Family -> its template, and the token that ends a call."""


class Family:
    def __init__(self, template: str, end: str) -> None:
        tokenizer = build_family_tokenizer(template, eos_token=end)
        self.renderer = Renderer(tokenizer)
        self.eos_id = tokenizer.convert_tokens_to_ids(end)
        self.compiler = GrammarCompiler(tokenizer, vocab_size=len(tokenizer), eos_ids=[self.eos_id])

    def write_rest(self, name: str, arguments: str, *, has_name: bool) -> str:
        """A call as the template writes it, after a forced prefix with or without the name."""
        call = self.renderer.rendered_call
        tail = call.tail.removeprefix('"}').replace("call00000", "abcDEF123")
        separator = call.separator.replace("call00000", "abcDEF123")
        return f"{'' if has_name else name + separator}{arguments}{tail}"

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether the grammar allows the text's tokens, and then the end of the reply."""
        matcher: TokenMatcher = self.compiler.open(grammar)
        try:
            for token_id in (*self.renderer.encode(text), self.eos_id):
                matcher.accept(token_id)
        except ValueError:
            return False
        return True


@pytest.fixture(scope="module", params=JSON_FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family(*JSON_FAMILIES[request.param])


@pytest.mark.parametrize("name", [None, "f", "find_all"])
def test_a_forced_call_is_written_as_the_template_writes_it(family: Family, name: str | None) -> None:
    grammar = constrain_call(TOOLS, family.renderer, name=name, is_single_call=True)
    prefix, _ = family.renderer.build_call_prefix(name, (), has_grammar=True)
    called = name or "find_all"
    rest = family.write_rest(called, '{"a": 3}', has_name=name is not None)
    assert family.accepts(grammar, rest)
    parser = family.renderer.build_parser((), new_call_id=str, has_tools=True, prefix=prefix)
    [call] = parser.parse(rest).tool_calls
    assert (call.name, json.loads(call.arguments)) == (called, {"a": 3})
    assert not family.accepts(grammar, family.write_rest(called, '{"b": 3}', has_name=name is not None))
    assert not family.accepts(grammar, family.write_rest(called, '{"a": 3', has_name=name is not None))
    if name is None:
        assert not family.accepts(grammar, family.write_rest("other", '{"a": 3}', has_name=False))


def test_a_constrained_reply_may_be_a_call_instead(family: Family) -> None:
    constraint = constrain_choice(["yes"], "guided_choice")
    assert constraint is not None
    grammar = constrain_reply(constraint, family.renderer, (), TOOLS, is_single_call=False)
    start = family.renderer.rendered_call.start
    call = start + family.write_rest("f", '{"a": 3}', has_name=False)
    assert family.accepts(grammar, call)
    is_harmony = family.renderer.is_harmony
    assert family.accepts(grammar, "<|channel|>final<|message|>yes" if is_harmony else "yes")
    assert family.accepts(grammar, "yes") is not is_harmony
    if is_harmony:
        analysis = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant"
        assert family.accepts(grammar, f"{analysis}<|channel|>final<|message|>yes")
        assert family.accepts(grammar, analysis + call)
        alone = constrain_reply(constraint, family.renderer, (), (), is_single_call=False)
        assert family.accepts(alone, f"{analysis}<|channel|>final<|message|>yes")
        assert not family.accepts(alone, analysis + call)


def test_only_formats_with_one_call_in_a_block_repeat_it() -> None:
    repeats = {}
    for name, (template, end) in JSON_FAMILIES.items():
        family = Family(template, end)
        block = family.renderer.rendered_call.start + family.write_rest("f", '{"a": 3}', has_name=False)
        constraint = constrain_choice(["yes"], "guided_choice")
        assert constraint is not None
        grammar = constrain_reply(constraint, family.renderer, (), TOOLS, is_single_call=False)
        repeats[name] = family.accepts(grammar, block + block)
    assert {name for name, is_repeated in repeats.items() if is_repeated} == {"hermes", "mistral args", "mistral name"}
