"""The pocket model: a small Llama with its own tokenizer and chat template, made here in seconds, without a network.

It is a learning instrument: too small for anything but the arithmetic problems its tokenizer was trained on, and yet it
is loaded, rendered, sampled, trained and saved as any model of the hub is. Numbers are split into digits; the JSON of
tools and calls is merged into few tokens, so that an agent's prompt is short.
"""

from __future__ import annotations

from importlib.resources import files

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY_SIZE = 768
MAX_POSITIONS = 16384
INITIALIZER_RANGE = 0.06
"""The usual 0.02 is made for wide models; a narrow one then needs twice the steps to learn to copy a number."""
ROPE_THETA = 500.0
"""Conversations are short: slower rotations would tell no positions apart."""
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""One token each, and yet part of the text: decoding keeps them."""
WORDS = r'\{"[^\d\n]*| [-+*/] \(?| ?\p{L}+(?: $|\n)?|,? $|\n+|[^\s\p{L}]+|\s+'
"""What merges never cross: JSON up to a digit, a spaced operator, a word, a run of anything else."""
GGUF_WORDS = r'\{"[^\d\n]*| [-+*/] \(?| ?\p{L}+|\n+|[^\s\p{L}]+|\s+'
"""The same without words that end in a space, so that merges seldom cross words where nothing keeps them apart."""


def build_pocket_tokenizer(text: str | None = None, *, is_for_gguf: bool = False) -> PreTrainedTokenizerFast:
    """Train the tokenizer, by default on the text that comes with the package; the same text gives the same ids.

    Conversations of another agent, without control tokens and markup, give a tokenizer that is short on that agent's
    words. llama.cpp does not know the splitting into words, so a model that is to be exported as GGUF needs a tokenizer
    that learns from words but then sets apart digits alone (`is_for_gguf`), for some 10 % more tokens.
    """
    resources = files("tunesmith.model")
    if text is None:
        text = resources.joinpath("pocket_corpus.txt").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = PreTokenizers(
        [
            Digits(individual_digits=True),
            Split(Regex(GGUF_WORDS if is_for_gguf else WORDS), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARKUP_TOKENS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    if is_for_gguf:
        backend.pre_tokenizer = PreTokenizers(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=resources.joinpath("pocket_template.jinja").read_text(encoding="utf-8"),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_pocket_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, hidden_size: int = 192, num_layers: int = 3
) -> LlamaForCausalLM:
    """A Llama of 1.3 million random parameters for the tokenizer, in float32; `seed` fixes them."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=max(1, hidden_size // 96),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
