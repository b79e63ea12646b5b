"""Vocabulary of a GGUF file: byte-level BPE tokens, merges, and the name of a pre-tokenizer.

llama.cpp selects a built-in pre-tokenizer by name. The tokenizer's own split rules are compared with those of each
name, and a tokenizer that matches none is refused, because llama.cpp would split text differently from training. GGUF
cannot store a normalizer; only NFC is allowed, which leaves composed text unchanged.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tunesmith.errors import ModelError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types: token of the BPE model, special token, token added as text, id without a token."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
NO_DIGITS = re.compile("[!-/:-~\u0100-\u0120]*")
"""ASCII without digits in the alphabet of byte-level BPE, which maps spaces and control characters to letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """Pre-tokenization: split patterns in order, and whether a word that is a token itself skips the merges."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False


SUPERBPE = "superbpe"
"""This pre-tokenizer of llama.cpp splits off runs of digits and cuts them into groups of three, which gives the tokens
of single digits if no merge contains a digit."""
PRE_TOKENIZERS: Mapping[SplitRules, str] = {
    SplitRules(patterns=(GPT2,)): "gpt-2",
    SplitRules(patterns=(DIGIT, GPT2)): "smollm",
    SplitRules(patterns=(f"{CONTRACTION}|{WORDS % ''}",)): "qwen2",
    SplitRules(patterns=(f"{CONTRACTION}|{WORDS % '{1,3}'}",), ignore_merges=True): "llama-bpe",
    SplitRules(patterns=(f"{CONTRACTION}|{WORDS % '{1,3}'}",)): "smaug-bpe",
    SplitRules(patterns=(DIGIT,)): SUPERBPE,
}
"""Split rules that llama.cpp implements exactly as `tokenizers` does, with their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Tokenizer fields of a GGUF file, with one token per embedding of the model."""

    pre_tokenizer: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int]
    """Ids by role: bos, eos, eot, eom, unk, pad; missing roles are omitted."""
    has_bos: bool
    """Whether encoding adds a beginning-of-sequence token."""
    has_eos: bool
    chat_templates: Mapping[str, str]
    """Templates by name; `default` is used unless another is requested."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.token_types)


def describe_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, end_ids: Sequence[int] = ()
) -> GgufVocabulary:
    """Tokenizer fields; raises ModelError for a tokenizer that llama.cpp cannot reproduce.

    `end_ids` are ids besides the eos that end a generation.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("writing GGUF needs a tokenizer with tokenizer.json; remove gguf from formats")
    parts = json.loads(backend.to_str())
    check_tokenizer(parts)
    pre_tokenizer = find_pre_tokenizer(parts)
    tokens, types = list_tokens(parts, num_embeddings=config.vocab_size)
    has_bos, has_eos = find_added_specials(tokenizer)
    templates = tokenizer.chat_template or {}
    return GgufVocabulary(
        pre_tokenizer=pre_tokenizer,
        tokens=tokens,
        token_types=types,
        merges=tuple(" ".join(pair) if isinstance(pair, list) else pair for pair in parts["model"]["merges"]),
        special_ids=find_special_ids(tokenizer, config, end_ids),
        has_bos=has_bos,
        has_eos=has_eos,
        chat_templates=templates if isinstance(templates, dict) else {"default": templates},
    )


def check_tokenizer(parts: Mapping[str, Any]) -> None:
    """Raise ModelError for features that llama.cpp's byte-level BPE does not have."""
    model, normalizer, decoder = parts["model"], parts["normalizer"] or {}, parts["decoder"] or {}
    refused = {
        f"the model {model['type']} (not BPE)": model["type"] != "BPE",
        "byte fallback": bool(model.get("byte_fallback")),
        "a prefix or suffix of subwords": bool(
            model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        ),
        f"the normalizer {normalizer.get('type')}": normalizer.get("type") not in {None, "NFC"},
        f"the decoder {decoder.get('type')} (not ByteLevel)": decoder.get("type") != "ByteLevel",
    }
    stripped = [
        token["content"]
        for token in parts["added_tokens"]
        if token["lstrip"] or token["rstrip"] or token["single_word"]
    ]
    refused[f"added tokens that strip adjacent spaces or match whole words only: {stripped[:3]}"] = bool(stripped)
    found = [name for name, is_refused in refused.items() if is_refused]
    if found:
        raise ModelError(
            f"the tokenizer has {'; '.join(found)}: GGUF cannot represent it. Leave gguf out of the formats"
        )


def find_pre_tokenizer(parts: Mapping[str, Any]) -> str:
    """Name of the built-in pre-tokenizer with the same split rules."""
    patterns = list_patterns(flatten_steps(parts["pre_tokenizer"] or {}))
    if patterns is not None:
        rules = SplitRules(patterns=patterns, ignore_merges=bool(parts["model"].get("ignore_merges")))
        name = PRE_TOKENIZERS.get(rules)
        if name is not None and not (name == SUPERBPE and has_merged_digits(parts["model"]["merges"])):
            return name
    raise ModelError(
        "the tokenizer's split rules match no supported pre-tokenizer of llama.cpp "
        f"({', '.join(PRE_TOKENIZERS.values())}): a GGUF file would encode text differently from the trained model. "
        "Leave gguf out of the formats"
    )


def has_merged_digits(merges: Sequence[Any]) -> bool:
    """Whether a merge may contain a digit of any script: an ASCII digit, or bytes of a multi-byte character."""
    merged = ("".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in merges)
    return any(not NO_DIGITS.fullmatch(token) for token in merged)


def flatten_steps(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of a pre-tokenizer as a flat list."""
    if step.get("type") == "Sequence":
        return [inner for part in step["pretokenizers"] for inner in flatten_steps(part)]
    return [step]


def list_patterns(steps: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """Patterns of the split steps before the final ByteLevel step; None for any other sequence of steps."""
    *splits, last = steps
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    patterns = [read_pattern(step) for step in splits] + ([GPT2] if last["use_regex"] else [])
    return None if None in patterns else tuple(pattern for pattern in patterns if pattern is not None)


def read_pattern(step: Mapping[str, Any]) -> str | None:
    """The pattern whose matches a step isolates; None for a step that does something else."""
    if step.get("type") == "Digits" and step["individual_digits"]:
        return DIGIT
    if step.get("type") == "Split" and (step["behavior"], step["invert"]) in {("Isolated", False), ("Removed", True)}:
        pattern: str | None = step["pattern"].get("Regex")
        return pattern
    return None


def list_tokens(parts: Mapping[str, Any], *, num_embeddings: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Token and token type of each embedding; embeddings without a token are named [PAD<id>]."""
    token_by_id = {index: (token, NORMAL) for token, index in parts["model"]["vocab"].items()}
    for token in parts["added_tokens"]:
        token_by_id[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
    if max(token_by_id) >= num_embeddings:
        raise ModelError(
            f"the tokenizer has ids up to {max(token_by_id)} but the model has {num_embeddings} embeddings"
        )
    rows = [token_by_id.get(index, (f"[PAD{index}]", UNUSED)) for index in range(num_embeddings)]
    tokens, types = zip(*rows, strict=True)
    duplicates = [token for token, count in Counter(tokens).items() if count > 1]
    if duplicates:
        raise ModelError(f"the tokenizer has several ids for one token {duplicates[:3]}: GGUF cannot represent it")
    return tokens, types


def find_added_specials(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether encoding plain text adds the beginning- and the end-of-sequence token."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for has_bos, has_eos in ((False, False), (True, False), (False, True), (True, True)):
        before = [tokenizer.bos_token_id] if has_bos else []
        after = [tokenizer.eos_token_id] if has_eos else []
        if full == [*before, *plain, *after]:
            return has_bos, has_eos
    raise ModelError(
        f"the tokenizer adds other tokens than bos and eos to text ({full} for {plain}): GGUF cannot represent it. "
        "Leave gguf out of the formats"
    )


def find_special_ids(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, end_ids: Sequence[int]
) -> dict[str, int]:
    """Ids by role. Up to two more `end_ids` become end of turn (eot) and end of message (eom): both end a reply."""
    eos = tokenizer.eos_token_id
    found = {
        "bos": tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id,
        "eos": eos,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    others = [index for index in dict.fromkeys(end_ids) if index != eos]
    if len(others) > 2:
        raise ModelError(f"the generation config ends replies at {others} besides {eos}: GGUF can store only two more")
    found |= dict(zip(("eot", "eom"), others, strict=False))
    if found["bos"] is None:
        found["bos"] = eos  # without a bos, llama.cpp assumes id 11
    return {role: index for role, index in found.items() if index is not None}
