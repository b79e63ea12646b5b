"""The bound on characters per token holds, and is None where there is none."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from chat_templates import CHATML
from fakes import build_chat_tokenizer
from tunesmith.chat.renderer import find_longest_token
from tunesmith.model.pocket import build_pocket_tokenizer


def build_byte_level(*steps, normalizer=None, **options) -> Tokenizer:
    backend = Tokenizer(models.BPE(**options))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["an answer to all, an answer"], trainer)
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


TEXTS = [
    "an answer " * 50,
    " " * 300,
    "e\u0301" * 100,
    "\u1f82" * 50,
    "\U0001f600" * 40,
    "a\u0302\u0323" * 60,
    "\uac01" * 40,
]


@pytest.mark.parametrize(
    "backend",
    [
        build_chat_tokenizer(CHATML).backend_tokenizer,
        build_pocket_tokenizer().backend_tokenizer,
        build_byte_level(normalizer=normalizers.NFC()),
        build_byte_level(pre_tokenizers.Split(Regex(" "), "isolated"), normalizer=normalizers.NFKC()),
        build_byte_level(normalizer=normalizers.Sequence([normalizers.Replace(" ", "__"), normalizers.Prepend("_")])),
    ],
)
def test_no_token_is_longer_than_the_bound(backend):
    longest = find_longest_token(backend)
    rng = random.Random(0)
    for text in [*TEXTS, *("".join(rng.choices(TEXTS, k=3)) for _ in range(20))]:
        assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False).ids)


def drop_blank() -> Tokenizer:
    backend = build_byte_level()
    backend.add_special_tokens([AddedToken("<s>", rstrip=True)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        build_byte_level(pre_tokenizers.Split(" ", "removed")),
        build_byte_level(normalizer=normalizers.Strip()),
        build_byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
        build_byte_level(normalizer=normalizers.Replace("  ", " ")),
        Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True)),
        Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
        Tokenizer(models.WordLevel({"a": 0})),
        drop_blank(),
    ],
)
def test_tokenizers_that_drop_text_have_no_bound(backend):
    assert find_longest_token(backend) is None
