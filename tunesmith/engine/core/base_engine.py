"""What every engine knows of the policy, whatever samples from it: its context, vocabulary and end-of-sequence ids."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.grammar.matcher import GrammarCompiler


class BaseEngine:
    """Base of the engines; their requests and versions are their own."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._eos_ids = collect_eos_ids(model, tokenizer)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self.grammars = GrammarCompiler(tokenizer, vocab_size=self._vocab_size, eos_ids=self._eos_ids)
        """The grammars that requests name in their distribution; the trainer replays them, also those of another
        engine."""

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids


def collect_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-sequence ids of the generation config, the model config and the tokenizer together."""
    ids: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            ids.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(ids)
