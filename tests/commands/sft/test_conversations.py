"""Conversations: replies are trained and nothing else, and rows that cannot be trained on are named."""

from __future__ import annotations

import copy
import json

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from conversation_examples import ROW, TOOL
from fakes import build_chat_tokenizer
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.commands.sft.plan import choose_rows, load_conversation_rows
from tunesmith.config import ConversationDataSection
from tunesmith.errors import DataError, MissingDataError
from tunesmith.model.pocket import build_pocket_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_pocket_tokenizer()


@pytest.fixture(scope="module")
def reader(tokenizer):
    return ConversationReader(tokenizer)


def change_message(index, **fields):
    row = copy.deepcopy(ROW)
    row["messages"][index] |= fields
    return row


def decode_trained(tokenizer, sample):
    return tokenizer.decode(
        [i for i, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True) if is_sampled]
    )


def test_only_replies_and_their_end_tokens_are_trained(tokenizer, reader):
    (sample,) = reader.read([ROW], max_model_len=256)
    assert decode_trained(tokenizer, sample) == (
        '<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call><|im_end|>'
        "The answer is 42.<|im_end|>"
    )
    whole = tokenizer.apply_chat_template(ROW["messages"], tools=[TOOL], tokenize=False)
    assert tokenizer.decode(list(sample.token_ids)) == whole.removesuffix("\n")


def test_a_reply_of_weight_0_is_context_only(tokenizer, reader):
    (sample,) = reader.read([change_message(2, weight=0)], max_model_len=256)
    assert decode_trained(tokenizer, sample) == "The answer is 42.<|im_end|>"
    assert sample.token_ids == reader.read([ROW], max_model_len=256)[0].token_ids
    with pytest.raises(DataError, match=r"row 0: messages\[2\].weight must be 0 or 1, got 0.5"):
        reader.read([change_message(2, weight=0.5)], max_model_len=256)
    with pytest.raises(DataError, match="row 0 has no assistant message to train on"):
        reader.read(
            [{"messages": [ROW["messages"][1], {"role": "assistant", "content": "x", "weight": 0}]}], max_model_len=64
        )


def test_weighted_parts_may_be_of_any_type_of_text(tokenizer, reader):
    parts = [
        {"type": "refusal", "refusal": "I will not"},
        {"type": "text", "weight": 1},
        {"type": "text", "text": " 42"},
    ]
    (sample,) = reader.read([change_message(4, content=[parts[0] | {"weight": 0}, *parts[1:]])], max_model_len=256)
    assert decode_trained(tokenizer, sample).endswith("</tool_call><|im_end|> 42<|im_end|>")
    assert "I will not 42<|im_end|>" in tokenizer.decode(list(sample.token_ids))


def test_all_of_a_text_is_trained_with_its_control_tokens(tokenizer, reader):
    text = "<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    (sample,) = reader.read([{"text": text, "answer": "42"}], max_model_len=256)
    assert sample.token_ids == tuple(tokenizer.encode(text, add_special_tokens=False))
    assert sample.token_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert sample.is_sampled == (False,) + (True,) * (len(sample.token_ids) - 1)


def test_an_end_token_is_appended_to_a_text_without_one(tokenizer, reader):
    for text, end in (("6 * 7 is 42.", 1), ("6 * 7 is 42.<|im_end|>", 0), ("6 * 7 is 42.<|im_end|>\n", 0)):
        (sample,) = reader.read([{"text": text}], max_model_len=256)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert sample.token_ids == (*ids, *[tokenizer.eos_token_id] * end)


def test_a_text_that_starts_with_the_bos_token_gets_no_second_one(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<|start|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", tokenizer.bos_token_id)]
    )
    reader = ConversationReader(tokenizer)
    (plain,), (marked,) = (reader.read([{"text": text}], max_model_len=256) for text in ("6 * 7", "<|start|>6 * 7"))
    assert plain.token_ids == marked.token_ids
    assert plain.token_ids.count(tokenizer.bos_token_id) == 1


def test_messages_take_precedence_over_text(reader):
    assert reader.read([ROW | {"text": "other"}], max_model_len=256) == reader.read([ROW], max_model_len=256)


def test_rows_written_by_save_to_disk_are_read(tmp_path, reader):
    Dataset.from_list([{"text": "one"}, {"text": "two"}]).save_to_disk(tmp_path / "rows")
    rows = load_conversation_rows(ConversationDataSection(path=str(tmp_path / "rows")))
    assert [sample.group_index for sample in reader.read(rows, max_model_len=64)] == [0, 1]


def test_rows_that_cannot_be_trained_on(reader):
    for row, match in (
        ({"messages": ROW["messages"][:2]}, "row 1 has no assistant message"),
        ({"prompt": "hello"}, "row 1 has neither messages nor text; its fields are prompt"),
        ({"messages": []}, "row 1: messages must be a non-empty list"),
        ({"text": " "}, "row 1: text must be a non-empty string, got ' '"),
        ({"text": "a\ud800"}, "row 1: text has lone surrogates, which cannot be encoded"),
        ({"text": "<|im_end|>"}, r"row 1: text is one token, '<\|im_end\|>', and the first token of a text is not"),
        ({"text": ["a"]}, r"row 1: text must be a non-empty string, got \['a'\]"),
        (change_message(4, content=" "), r"row 1: messages\[4\] is an empty assistant message"),
        (change_message(1, role="robot"), r"row 1: messages\[1\].role is 'robot'"),
    ):
        with pytest.raises(DataError, match=match):
            reader.read([ROW, row], max_model_len=256)


def test_long_rows_are_an_error_or_dropped(reader):
    long_row = change_message(1, content="What is 6 * 7? " * 9)
    rows = [ROW, long_row, ROW]
    with pytest.raises(DataError, match=r"row 1 has \d+ tokens, more than model.max_model_len=80: .*long_rows=drop"):
        reader.read(rows, max_model_len=80)
    samples = reader.read(rows, max_model_len=80, drops_long_rows=True)
    assert [sample.group_index for sample in samples] == [0, 1]


def test_thinking_is_disabled_in_prompt_and_reply():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    tokenizer = build_chat_tokenizer(template)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the result"}]}
    (sample,) = ConversationReader(tokenizer, enable_thinking=False).read([row], max_model_len=99)
    assert decode_trained(tokenizer, sample) == "the result<|im_end|>"
    assert "<think></think>the result" in tokenizer.decode(list(sample.token_ids))


def test_json_lines_keep_the_fields_of_each_row(tmp_path):
    """`datasets` would add the arguments of all tool calls to each one."""
    rows = [{"messages": [{"content": None, "arguments": {name: 1}}]} for name in ("a", "b")]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    for path in (str(tmp_path), str(tmp_path / "train.jsonl")):
        assert load_conversation_rows(ConversationDataSection(path=path)) == rows
    assert load_conversation_rows(ConversationDataSection(path=(str(tmp_path), str(tmp_path)))) == rows + rows


def test_null_fields_of_other_formats_are_dropped(tmp_path):
    rows = [{"messages": [{"role": "user", "arguments": {name: 1}}]} for name in ("a", "b")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert load_conversation_rows(ConversationDataSection(path=str(tmp_path / "rows.json"))) == rows


def test_files_that_cannot_be_read(tmp_path):
    file = tmp_path / "rows.jsonl"
    for text, match in (
        ("{}\n{", r"line 2 of .*rows.jsonl' is not JSON"),
        ("[1]", "must be a JSON object"),
        ("\n", "no rows"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=match):
            load_conversation_rows(ConversationDataSection(path=str(file)))
    with pytest.raises(MissingDataError, match="does not exist"):
        load_conversation_rows(ConversationDataSection(path=str(tmp_path / "nothing.jsonl")))


def test_rows_are_held_out_by_the_seed():
    held_out = choose_rows(range(20), 0.1, seed=3)
    assert len(held_out) == 2 and held_out < set(range(20))
    assert choose_rows(range(20), 0.1, seed=3) == held_out
    assert any(choose_rows(range(20), 0.1, seed=seed) != held_out for seed in range(4, 8))
    assert len(choose_rows(range(20), 0.001, seed=3)) == 1
    assert choose_rows(range(3), 0, seed=3) == set()
    with pytest.raises(DataError, match="eval_fraction=0.9 of 3 rows leaves none to train on"):
        choose_rows(range(3), 0.9, seed=3)
