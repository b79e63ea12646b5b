"""Vocabularies of GGUF files, and tokenizers that GGUF cannot represent."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split, Whitespace
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from exported_models import CHAT, CONFIGS, NUM_EMBEDDINGS, build_tokenizer
from tunesmith.commands.export.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    describe_vocabulary,
    has_merged_digits,
)
from tunesmith.errors import ModelError
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer

CONFIG = CONFIGS["smollm"]


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe"])
def test_pre_tokenizers_are_recognized_by_their_split_rules(name):
    assert describe_vocabulary(build_tokenizer(name), CONFIG).pre_tokenizer == name


def test_every_embedding_has_a_token_with_its_type():
    tokenizer = build_tokenizer("smollm")
    described = describe_vocabulary(tokenizer, CONFIG)
    assert len(described.tokens) == len(described.token_types) == NUM_EMBEDDINGS
    for token, index in tokenizer.get_vocab().items():
        assert described.tokens[index] == token
    types = dict(zip(described.tokens, described.token_types, strict=True))
    assert (types["<|im_end|>"], types["<tool_call>"], types["a"]) == (CONTROL, USER_DEFINED, NORMAL)
    assert types[f"[PAD{NUM_EMBEDDINGS - 1}]"] == UNUSED
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert [merge.split(" ") for merge in described.merges] == merges and len(merges) > 20


def test_special_ids_and_chat_templates_are_kept():
    described = describe_vocabulary(build_tokenizer("llama-bpe"), CONFIG, end_ids=[2, 0, 1])
    assert described.has_bos and not described.has_eos
    assert described.special_ids == {"bos": 0, "eos": 2, "pad": 0, "eot": 0, "eom": 1}
    assert described.chat_templates == {"default": CHAT}


def test_the_tokenizers_of_transformers_are_recognized():
    vocabulary, merges = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}, [("a", "b")]
    assert describe_vocabulary(Qwen2Tokenizer(vocabulary, merges), CONFIG).pre_tokenizer == "qwen2"
    assert describe_vocabulary(GPT2Tokenizer(vocabulary, merges), CONFIG).pre_tokenizer == "gpt-2"


def test_a_tokenizer_without_bos_names_its_eos_and_never_adds_it():
    described = describe_vocabulary(build_tokenizer("smollm"), CONFIG)
    assert not described.has_bos and described.special_ids["bos"] == described.special_ids["eos"] == 2


def test_more_end_ids_than_gguf_can_store_are_refused():
    with pytest.raises(ModelError, match=r"\[0, 1, 5\] besides 2"):
        describe_vocabulary(build_tokenizer("smollm"), CONFIG, end_ids=[0, 1, 5])


def test_the_pocket_tokenizer_is_refused():
    with pytest.raises(
        ModelError,
        match=r"no supported pre-tokenizer of llama.cpp \(gpt-2, .*, smaug-bpe, superbpe\)",
    ):
        describe_vocabulary(build_pocket_tokenizer(), CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        PreTokenizers([ByteLevel(add_prefix_space=False), Digits(individual_digits=True)]),
        PreTokenizers([Digits(individual_digits=False), ByteLevel(add_prefix_space=False)]),
        PreTokenizers([Split("a", behavior="isolated"), ByteLevel(add_prefix_space=False)]),
        ByteLevel(add_prefix_space=True),
        Whitespace(),
    ],
)
def test_other_split_rules_are_refused(change):
    tokenizer = build_tokenizer("smollm")
    tokenizer.backend_tokenizer.pre_tokenizer = change
    with pytest.raises(ModelError, match="split rules match no supported"):
        describe_vocabulary(tokenizer, CONFIG)


def test_ignore_merges_is_refused_where_llama_cpp_does_not_support_it():
    tokenizer = build_tokenizer("smollm")
    tokenizer.backend_tokenizer.model.ignore_merges = True
    with pytest.raises(ModelError, match="split rules match no supported"):
        describe_vocabulary(tokenizer, CONFIG)


def test_normalizers_other_than_nfc_are_refused():
    tokenizer = build_tokenizer("smollm")
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match="the normalizer Lowercase"):
        describe_vocabulary(tokenizer, CONFIG)


def test_added_tokens_that_strip_spaces_are_refused():
    tokenizer = build_tokenizer("smollm")
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    with pytest.raises(ModelError, match=r"strip adjacent spaces.*<mask>"):
        describe_vocabulary(tokenizer, CONFIG)


@pytest.mark.parametrize(
    "model", [WordPiece({"a": 0, "[UNK]": 1}), Unigram([("a", 0.0)]), BPE({"a": 0}, [], byte_fallback=True)]
)
def test_other_kinds_of_tokenizers_are_refused(model):
    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    with pytest.raises(ModelError, match="GGUF cannot represent it"):
        describe_vocabulary(tokenizer, CONFIG)


def test_added_tokens_other_than_bos_and_eos_are_refused():
    tokenizer = build_tokenizer("smollm")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_start|>", special_tokens=[("<|im_start|>", 1)]
    )
    with pytest.raises(ModelError, match="adds other tokens than bos and eos"):
        describe_vocabulary(tokenizer, CONFIG)


def test_more_tokens_than_embeddings_are_refused():
    tokenizer = build_tokenizer("smollm")
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(100)])
    with pytest.raises(ModelError, match="but the model has 416 embeddings"):
        describe_vocabulary(tokenizer, CONFIG)


def test_the_pocket_tokenizer_for_gguf_is_recognized():
    tokenizer = build_pocket_tokenizer(is_for_gguf=True)
    config = build_pocket_model(tokenizer, hidden_size=96, num_layers=1).config
    assert describe_vocabulary(tokenizer, config).pre_tokenizer == "superbpe"


@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (["a", "b"], False),
        (["\u0120", "a"], False),
        (['{"', "x"], False),
        (["1", "a"], True),
        (["a", "9"], True),
        (["\u00c2", "\u00bd"], True),
    ],
)
def test_merges_that_may_contain_a_digit_are_found(merge, expected):
    assert has_merged_digits([["a", "b"], merge]) is expected
    assert has_merged_digits(["a b", " ".join(merge)]) is expected


def test_single_digit_splits_with_merged_multi_byte_digits_are_refused():
    tokenizer = build_pocket_tokenizer("\u00bd\u00bd \u00bd\u00bd\n" * 50, is_for_gguf=True)
    config = build_pocket_model(tokenizer, hidden_size=96, num_layers=1).config
    with pytest.raises(ModelError, match="split rules match no supported"):
        describe_vocabulary(tokenizer, config)
