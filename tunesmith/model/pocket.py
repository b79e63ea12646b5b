"""The pocket model: a small Llama with its own tokenizer and chat template, built in seconds without a network.

It serves demos and tests. It is too small for anything but the arithmetic problems that its tokenizer was trained on,
but it is loaded, rendered, sampled, trained and saved like any model from the hub. Numbers are split into digits; the
JSON of tools and tool calls takes few tokens, so that an agent's prompt is short.
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
"""The usual 0.02 suits wide models; with it this narrow one needs twice the steps to learn to copy a number."""
ROPE_THETA = 500.0
"""Conversations are short: with a larger base most rotations would hardly differ between positions."""
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""One token each, but not special: decoding keeps them."""
WORDS = r'\{"[^\d\n]*| [-+*/] \(?| ?\p{L}+(?: $|\n)?|,? $|\n+|[^\s\p{L}]+|\s+'
"""Pre-tokenizer units; BPE merges never cross them: JSON up to a digit, a spaced operator, a word, others."""
NAME_WORDS = (
    r'\{"[^\d\n]*| [-+*/] \(?|\p{Lu}\p{Ll}*(?: (?=\p{Lu}))?| ?\p{Ll}+(?: $| (?=\p{Lu})|\n)?|[,.:]? (?=\p{Lu})'
    r"|,? $|\n+|[^\s\p{L}]+|\s+"
)
"""The same, but the space before a capital letter belongs to what precedes it: a name is the same tokens everywhere."""
GGUF_WORDS = r'\{"[^\d\n]*| [-+*/] \(?| ?\p{L}+|\n+|[^\s\p{L}]+|\s+'
"""The same without units that end in a space, so that merges seldom cross words when the units are not applied."""


def build_pocket_tokenizer(
    text: str | None = None,
    *,
    is_for_gguf: bool = False,
    has_names: bool = False,
    vocabulary_size: int = VOCABULARY_SIZE,
) -> PreTrainedTokenizerFast:
    """Train the tokenizer, by default on the package's own corpus; the same text gives the same ids.

    For another agent pass its conversations, without control tokens and markup: their words then take few tokens.
    llama.cpp does not support this pre-tokenizer, so a model for GGUF export needs a tokenizer that is trained on its
    units but then splits only digits (`is_for_gguf`), which gives some 10 % more tokens. Where an agent has to copy
    names that no training text has, `has_names` makes that easier to learn.
    """
    resources = files("tunesmith.model")
    if text is None:
        text = resources.joinpath("pocket_corpus.txt").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    words = NAME_WORDS if has_names else GGUF_WORDS if is_for_gguf else WORDS
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = PreTokenizers(
        [
            Digits(individual_digits=True),
            Split(Regex(words), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary_size - len(MARKUP_TOKENS),
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
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int = 0,
    hidden_size: int = 192,
    num_layers: int = 3,
    num_kv_heads: int | None = None,
) -> LlamaForCausalLM:
    """A float32 Llama with 1.3 million random parameters by default; `seed` fixes them.

    There is one key-value head for three heads, unless `num_kv_heads` says otherwise; with as many as there are heads
    the model learns to copy sooner.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=num_kv_heads or max(1, hidden_size // 96),
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
