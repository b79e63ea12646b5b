"""The engine of a rank whose vLLM is another rank's: it has the limits of the policy and samples nothing."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.engine.core.base_engine import BaseEngine
from tunesmith.errors import EngineError
from tunesmith.types import Completion, OnTokens, Sampling


class DistantEngine(BaseEngine):
    """Implements `tunesmith.types.Engine` on a rank that runs no tasks."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, max_model_len: int
    ) -> None:
        super().__init__(model, tokenizer, max_model_len=max_model_len)
        self._policy_version = 0

    @property
    def policy_version(self) -> int:
        return self._policy_version

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
