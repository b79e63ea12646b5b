"""The engine of a rank whose vLLM is another rank's: it has the policy's facts and samples nothing."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.engine.engine import collect_eos_ids
from tunesmith.errors import EngineError
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.types import Completion, OnTokens, Sampling


class DistantEngine:
    """Implements `tunesmith.types.Engine` on a rank that runs no tasks."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, max_model_len: int
    ) -> None:
        self._max_model_len = max_model_len
        self._eos_ids = collect_eos_ids(model, tokenizer)
        vocab_size = model.get_input_embeddings().num_embeddings
        self.grammars = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_ids=self._eos_ids)
        """For the trainer, as `VllmEngine.grammars`."""
        self._policy_version = 0

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Raise EngineError: only the first rank samples."""
        raise EngineError("only the first rank samples with vLLM, and this rank was asked to")

    def pause(self) -> None:
        """Nothing to do."""

    def resume(self, policy_version: int) -> None:
        """Note the version."""
        self._policy_version = policy_version

    def compute_stats(self) -> dict[str, float]:
        """No counters."""
        return {}
