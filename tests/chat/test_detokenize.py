"""Detokenization, complete and incremental."""

from __future__ import annotations

import random

import pytest
from rendering import NEXT, USER, build_renderer, extend, make_prompt
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from chat_templates import QWEN25
from tunesmith.chat.renderer import Renderer


def test_text_hides_special_tokens_but_not_markup():
    renderer = build_renderer(QWEN25)
    ids = renderer.encode("a<|im_start|><think>b</think><tool_call>c<|im_end|>")
    assert renderer.decode(ids) == "a<think>b</think><tool_call>c"


@pytest.mark.parametrize("seed", range(30))
def test_incremental_text_equals_decoded_text(seed):
    renderer = build_renderer(QWEN25)
    rng = random.Random(seed)
    ids = renderer.encode("naive \u00e9t\u00e9 \u4f60\u597d \U0001f600 <tool_call>")
    ids = [i if rng.random() < 0.8 else rng.randrange(400) for i in ids for _ in range(rng.choice([1, 1, 2]))]
    stream = renderer.build_incremental_detokenizer()
    pieces = [stream.feed(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == renderer.decode(ids)


@pytest.mark.parametrize("seed", range(10))
def test_text_by_bytes_equals_that_of_the_tokenizer(seed):
    """Random ids are mostly invalid UTF-8; ids beyond the vocabulary have no text."""
    renderer = build_renderer(QWEN25)
    tokenizer, rng = renderer._tokenizer, random.Random(seed)
    hidden = set(renderer._template.hidden_ids)
    assert renderer._detokenizer._bytes_of is not None
    for _ in range(200):
        ids = [rng.randrange(len(tokenizer) + 3) for _ in range(rng.randrange(30))]
        shown = [token_id for token_id in ids if token_id not in hidden]
        text = tokenizer.backend_tokenizer.decode(shown, skip_special_tokens=False)
        assert renderer.decode(ids) == renderer.decode(tuple(ids)) == text
        assert renderer.decode_text(tuple(ids), has_reasoning=False) == (text if shown == ids else "")


def test_changed_ids_are_decoded_again():
    """The last reply is decoded once, though it is asked for twice."""
    renderer = build_renderer(QWEN25)
    ids = list(renderer.encode("a b"))
    first = renderer.decode(ids)
    ids += ids
    assert renderer.decode(ids) == first * 2
    assert renderer.decode(tuple(ids)) == first * 2
    assert renderer.decode(tuple(ids[:-1])) != first * 2


def test_bytes_are_used_only_where_the_text_of_ids_is_the_text_of_their_bytes():
    renderer = Renderer(build_byte_fallback_tokenizer(is_stripped=True))
    assert renderer._detokenizer._bytes_of is None


def test_incomplete_characters_are_held_back():
    renderer = build_renderer(QWEN25)
    first, *rest = renderer.encode("\U0001f600")
    stream = renderer.build_incremental_detokenizer()
    assert [stream.feed(i) for i in (first, *rest)] == [""] * len(rest) + ["\U0001f600"]


def build_byte_fallback_tokenizer(*, is_stripped: bool) -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma: words start with a U+2581 character, unknown characters are byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefgh", "\u2581a"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if is_stripped else replace
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * is_stripped)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = """{% for m in messages %}{{ m.role[0] + ' ' + m.content + '</s>' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'a ' }}{% endif %}"""
    return wrapped


def test_bytes_of_byte_fallback_tokens():
    renderer = Renderer(build_byte_fallback_tokenizer(is_stripped=False))
    text = "a b\u4f60<a\ufffd"
    assert b"".join(map(renderer.encode_token, renderer.encode(text))) == text.encode()


@pytest.mark.parametrize("is_stripped", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_incremental_text_equals_decoded_text_with_byte_fallback(is_stripped, seed):
    renderer = Renderer(build_byte_fallback_tokenizer(is_stripped=is_stripped))
    rng = random.Random(seed)
    ids = renderer.encode("a b c \u4f60\u597d \U0001f600 abc")
    ids = [i if rng.random() < 0.8 else rng.randrange(3, 268) for i in ids]
    stream = renderer.build_incremental_detokenizer()
    pieces = [stream.feed(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == renderer.decode(ids)


@pytest.mark.parametrize("is_stripped", [True, False])
def test_extended_prompts_have_no_extra_word_boundary(is_stripped):
    renderer = Renderer(build_byte_fallback_tokenizer(is_stripped=is_stripped))
    reply = {"role": "assistant", "content": "bad"}
    _, _, extended = extend(renderer, [USER], "bad", reply, [NEXT], end="</s>")
    anew = renderer.render(make_prompt(USER, reply, NEXT))
    assert extended[-12:] == anew[-12:]
