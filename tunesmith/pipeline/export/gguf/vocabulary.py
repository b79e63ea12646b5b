"""A tokenizer as GGUF holds it: byte-level BPE with a list of tokens, merges, and the name of a pre-tokenizer.

llama.cpp has its pre-tokenizers built in and knows them by name, so the tokenizer's own splitting rules are compared
with those, rule by rule. One that is not among them is refused: its text would be split elsewhere than in training.
What GGUF does not say at all (a normaliser) is allowed only where it changes no text in composed form (NFC).
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
"""Types of tokens: of the BPE model, special, added to it as text, and ids without a token."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
NO_DIGITS = re.compile("[!-/:-~\u0100-\u0120]*")
"""ASCII without digits as byte-level BPE writes it, spaces and control characters as letters of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRules:
    """How text is cut before merges: patterns applied one after the other; a whole word may skip the merges."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False


PRE_TOKENIZERS: Mapping[SplitRules, str] = {
    SplitRules(patterns=(GPT2,)): "gpt-2",
    SplitRules(patterns=(DIGIT, GPT2)): "smollm",
    SplitRules(patterns=(f"{CONTRACTION}|{WORDS % ''}",)): "qwen2",
    SplitRules(patterns=(f"{CONTRACTION}|{WORDS % '{1,3}'}",), ignore_merges=True): "llama-bpe",
    SplitRules(patterns=(f"{CONTRACTION}|{WORDS % '{1,3}'}",)): "smaug-bpe",
}
"""llama.cpp's names of the splittings that it does as `tokenizers` does."""
SINGLE_DIGITS, SUPERBPE = SplitRules(patterns=(DIGIT,)), "superbpe"
"""Nothing but each digit is set apart. llama.cpp sets runs of digits apart, then threes of them, which makes the same
tokens where merges hold no digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Everything of a tokenizer that a GGUF file holds; one token for each embedding of the model."""

    pre_tokenizer: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int]
    """By role: bos, eos, eot, eom, unk, pad; a role that the tokenizer has not is left out."""
    has_bos: bool
    """Plain text is given a beginning-of-sequence token."""
    has_eos: bool
    chat_templates: Mapping[str, str]
    """By name; `default` is the one that is used unless another is asked for."""

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.token_types)


def describe_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, end_ids: Sequence[int] = ()
) -> GgufVocabulary:
    """Raise ModelError for a tokenizer that llama.cpp cannot follow. `end_ids` end a generation besides the eos."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("the tokenizer has no tokenizer.json, from which GGUF is written; leave gguf out of formats")
    parts = json.loads(backend.to_str())
    check_tokenizer(parts)
    pre_tokenizer = find_pre_tokenizer(parts)
    tokens, types = list_tokens(parts, num_embeddings=config.vocab_size)
    has_bos, has_eos = find_added_ends(tokenizer)
    return GgufVocabulary(
        pre_tokenizer=pre_tokenizer,
        tokens=tokens,
        token_types=types,
        merges=tuple(" ".join(pair) if isinstance(pair, list) else pair for pair in parts["model"]["merges"]),
        special_ids=find_special_ids(tokenizer, config, end_ids),
        has_bos=has_bos,
        has_eos=has_eos,
        chat_templates=list_templates(tokenizer),
    )


def check_tokenizer(parts: Mapping[str, Any]) -> None:
    """Refuse what byte-level BPE in llama.cpp does not do."""
    model, normalizer, decoder = parts["model"], parts["normalizer"] or {}, parts["decoder"] or {}
    refused = {
        f"the model {model['type']} (not BPE)": model["type"] != "BPE",
        "byte fallback": bool(model.get("byte_fallback")),
        "a prefix or suffix of subwords": bool(
            model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        ),
        f"the normaliser {normalizer.get('type')}": normalizer.get("type") not in {None, "NFC"},
        f"the decoder {decoder.get('type')} (not ByteLevel)": decoder.get("type") != "ByteLevel",
    }
    stripped = [token["content"] for token in parts["added_tokens"] if affects_neighbours(token)]
    refused[f"tokens that take the spaces beside them or match whole words only: {stripped[:3]}"] = bool(stripped)
    named = [name for name, is_refused in refused.items() if is_refused]
    if named:
        raise ModelError(f"the tokenizer has {'; '.join(named)}: GGUF cannot say so. Leave gguf out of formats")


def affects_neighbours(token: Mapping[str, Any]) -> bool:
    return bool(token["lstrip"] or token["rstrip"] or token["single_word"])


def find_pre_tokenizer(parts: Mapping[str, Any]) -> str:
    """The name of the built-in pre-tokenizer that splits as this tokenizer does."""
    patterns = list_patterns(flatten(parts["pre_tokenizer"] or {}))
    if patterns is not None:
        splitting = SplitRules(patterns=patterns, ignore_merges=bool(parts["model"].get("ignore_merges")))
        if splitting in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[splitting]
        if splitting == SINGLE_DIGITS and not has_merged_digits(parts["model"]["merges"]):
            return SUPERBPE
    raise ModelError(
        "the tokenizer splits text in a way that is none of llama.cpp's known to us "
        f"({', '.join(PRE_TOKENIZERS.values())}): a GGUF file would read text differently from the trained model. "
        "Leave gguf out of formats"
    )


def has_merged_digits(merges: Sequence[Any]) -> bool:
    """Whether a merge may hold a digit, of whatever script: an ASCII one, or bytes of a longer character."""
    merged = ("".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in merges)
    return any(not NO_DIGITS.fullmatch(token) for token in merged)


def flatten(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A pre-tokenizer as the list of its steps."""
    if step.get("type") == "Sequence":
        return [inner for part in step["pretokenizers"] for inner in flatten(part)]
    return [step]


def list_patterns(steps: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """The patterns that cut text, before its bytes become letters at the end; None where that is not what is done."""
    *cuts, last = steps
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    patterns = [read_pattern(step) for step in cuts] + ([GPT2] if last["use_regex"] else [])
    return None if None in patterns else tuple(pattern for pattern in patterns if pattern is not None)


def read_pattern(step: Mapping[str, Any]) -> str | None:
    """The pattern whose matches one step sets apart, if that is what it does."""
    if step.get("type") == "Digits" and step["individual_digits"]:
        return DIGIT
    if step.get("type") == "Split" and (step["behavior"], step["invert"]) in {("Isolated", False), ("Removed", True)}:
        pattern: str | None = step["pattern"].get("Regex")
        return pattern
    return None


def list_tokens(parts: Mapping[str, Any], *, num_embeddings: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The token of each embedding and its type; embeddings without a token are called [PAD<id>]."""
    named = {index: (token, NORMAL) for token, index in parts["model"]["vocab"].items()}
    for token in parts["added_tokens"]:
        named[token["id"]] = (token["content"], CONTROL if token["special"] else USER_DEFINED)
    if max(named) >= num_embeddings:
        raise ModelError(f"the tokenizer has ids up to {max(named)} but the model has {num_embeddings} embeddings")
    rows = [named.get(index, (f"[PAD{index}]", UNUSED)) for index in range(num_embeddings)]
    tokens, types = zip(*rows, strict=True)
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise ModelError(f"the tokenizer has several ids for one token {twice[:3]}: GGUF cannot hold it")
    return tokens, types


def find_added_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether encoding plain text adds the beginning- and the end-of-sequence token."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for has_bos, has_eos in ((False, False), (True, False), (False, True), (True, True)):
        before = [tokenizer.bos_token_id] if has_bos else []
        after = [tokenizer.eos_token_id] if has_eos else []
        if whole == [*before, *plain, *after]:
            return has_bos, has_eos
    raise ModelError(
        f"the tokenizer adds other tokens than bos and eos to text ({whole} for {plain}): GGUF cannot say so. "
        "Leave gguf out of formats"
    )


def find_special_ids(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, end_ids: Sequence[int]
) -> dict[str, int]:
    """Ids by role. Ends besides the eos take the roles of end of turn and end of message, which also end a reply."""
    eos = tokenizer.eos_token_id
    found = {
        "bos": tokenizer.bos_token_id if tokenizer.bos_token_id is not None else config.bos_token_id,
        "eos": eos,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    others = [index for index in dict.fromkeys(end_ids) if index != eos]
    if len(others) > 2:
        raise ModelError(f"the generation config ends replies at {others} besides {eos}: GGUF has room for two more")
    found |= dict(zip(("eot", "eom"), others, strict=False))
    if found["bos"] is None:
        found["bos"] = eos  # a file without one means id 11 to llama.cpp, whatever that is
    return {role: index for role, index in found.items() if index is not None}


def list_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return dict(template)
    return {} if template is None else {"default": template}
