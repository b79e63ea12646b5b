"""The pocket model: small, reproducible, and loaded by transformers like any other model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.tasks.arithmetic import NAMES, TEMPLATES, THINGS, build_problems

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {
            "properties": {"expression": {"description": "Numbers and operators.", "type": "string"}},
            "required": ["expression"],
            "type": "object",
        },
        "description": "Compute an arithmetic expression.",
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "calculate", "arguments": {"expression": "6 * 7"}}}
CONVERSATION = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
    {"role": "assistant", "content": "The answer is 42."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_pocket_tokenizer()


def test_size_is_a_few_million_parameters(tokenizer):
    model = build_pocket_model(tokenizer)
    assert 1_000_000 < sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id == model.config.eos_token_id


def test_seed_fixes_the_weights_and_leaves_the_global_generator_alone(tokenizer):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, third = (build_pocket_model(tokenizer, seed=seed) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, third.lm_head.weight)


def test_tokenizer_is_the_same_each_time(tokenizer):
    assert build_pocket_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_numbers_are_single_digits(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("buys 907 bags")][-4:] == ["9", "0", "7", " bags"]


def test_every_word_of_the_generator_is_one_token(tokenizer):
    for problem in build_problems("train", num_problems=300, seed=5):
        num_words = len(problem.question.replace(",", " ,").replace(".", " .").replace("?", " ?").split())
        num_digits = sum(character.isdigit() for character in problem.question)
        assert len(tokenizer.encode(problem.question)) <= num_words + num_digits
    corpus_words = {tokenizer.decode([i]).strip() for i in range(len(tokenizer))}
    assert corpus_words >= set(NAMES) | set(THINGS)
    assert len(TEMPLATES) > 5


def test_a_name_is_the_same_tokens_wherever_it_stands():
    text = "".join(f"Who taught {first} {last}?\n{first} {last}\n" for first in ("Almin", "Tila") for last in NAMES)
    tokenizer = build_pocket_tokenizer(text * 3, has_names=True, vocabulary_size=290)
    name = tokenizer.encode("Tila Braitrair")
    places = ("<search>Tila Braitrair</search>", "taught Tila Braitrair, ", "\nTila Braitrair\n", "of: Tila Braitrair.")
    for place in places:
        ids = tokenizer.encode(place)
        assert any(ids[start : start + len(name)] == name for start in range(len(ids))), place
        assert tokenizer.decode(ids) == place
    assert len(tokenizer) == 290


def test_any_text_round_trips(tokenizer):
    text = 'Gr\u00fc\u00dfe 12,5 %\n\t<b> {"a": 1} \u4f60\u597d'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_writes_chatml_with_hermes_calls(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    assert text.startswith('<|im_start|>system\nUse the tool.\n{"name": "calculate", "parameters": ')
    assert text.split("<|im_start|>user\n")[1] == (
        "What is 6 * 7?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nThe answer is 42.<|im_end|>\n"
    )


def test_chat_template_takes_every_shape_a_client_sends(tokenizer):
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CONVERSATION]
    parts[2]["content"] = None
    parts[2]["tool_calls"] = [{**CALL, "function": {"name": "calculate", "arguments": '{"expression": "6 * 7"}'}}]
    expected = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    assert tokenizer.apply_chat_template(parts, tools=[TOOL], tokenize=False) == expected


def test_prompt_without_system_message_still_shows_tools(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION[1:2], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert text.startswith('<|im_start|>system\n{"name": "calculate"')
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_agent_conversation_is_short(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    assert len(tokenizer.encode(text)) < 100


def test_saved_folder_loads(tokenizer, tmp_path):
    model = build_pocket_model(tokenizer, seed=3, hidden_size=96, num_layers=1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, loaded_tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False)
    ids = tokenizer.encode(text)
    assert loaded_tokenizer.encode(text) == ids
    assert loaded_tokenizer.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False) == text
    assert loaded_tokenizer.pad_token_id == tokenizer.pad_token_id
    assert loaded_tokenizer.decode(ids, skip_special_tokens=True).count("<tool_call>") == 1
    with torch.no_grad():
        assert torch.equal(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
