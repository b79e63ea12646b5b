"""Tiny random models of the families that can be exported as GGUF, each with its byte-level BPE tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from tiny_models import FreshConfigs

CORPUS = (
    "The farmer's 12 hens laid 345 eggs; she sold 7 of them. We'll see what's left!\n",
    "def total(values):\n    return sum(values)  # the sum\n\n",
    "What is the price of 30 apples at 0.25 each? It is 7.5 dollars.\n",
)
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
NUM_EMBEDDINGS = 416
"""Larger than the vocabularies of the tokenizers."""
SIZES: dict[str, Any] = {
    "vocab_size": NUM_EMBEDDINGS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CONFIGS = FreshConfigs(
    {
        "smollm": LlamaConfig(**SIZES, tie_word_embeddings=True),
        "llama": LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3_ROPE),
        "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR_ROPE),
        "smollm3": SmolLM3Config(**SIZES | {"num_hidden_layers": 5}, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters=YARN_ROPE),
        "qwen3": Qwen3Config(**SIZES, head_dim=128),
        "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN_ROPE),
    }
)
TOKENIZERS = {
    "smollm": "smollm",
    "llama": "llama-bpe",
    "llama-biased": "gpt-2",
    "smollm3": "smaug-bpe",
    "qwen2": "qwen2",
    "qwen2-yarn": "qwen2",
    "qwen3": "qwen2",
    "qwen3-tied": "qwen2",
}


def build_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that llama.cpp has under this name."""
    if name == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    pattern = {"qwen2": QWEN2_PATTERN, "llama-bpe": LLAMA3_PATTERN, "smaug-bpe": LLAMA3_PATTERN}[name]
    split = Split(Regex(pattern), behavior="isolated")
    return PreTokenizers([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with that pre-tokenizer; `llama-bpe` adds a beginning-of-sequence token, as Llama 3 does."""
    backend = Tokenizer(BPE(ignore_merges=name == "llama-bpe"))
    backend.pre_tokenizer = build_pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in ("<tool_call>", "</tool_call>")]
    )
    if name == "llama-bpe":
        backend.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>" if name == "llama-bpe" else None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_random_model(config: PreTrainedConfig, *, seed: int = 0, std: float = 0.12) -> PreTrainedModel:
    """A model in which all weights, biases and norms affect the output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config)
        ).eval()  # from_config keeps the config, and saving changes it
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=std)
    return model


def save_tiny(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Save one of CONFIGS with its tokenizer as a Hugging Face folder."""
    build_random_model(CONFIGS[name]).to(dtype).save_pretrained(folder)
    build_tokenizer(TOKENIZERS[name]).save_pretrained(folder)
    return folder
