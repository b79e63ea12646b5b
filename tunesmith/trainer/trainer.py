"""One step: samples in, new weights out.

The loss of a (mini)batch is fixed by one weight per trained token before anything is computed; rows then only add up
its gradient. Nothing is updated until every row is done and every number is finite. The parameters are the sampler's
own, changed in place; the model stays in eval mode, so sampler and trainer run the same function.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from tunesmith.algorithms.table import resolve_algorithm
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.errors import ConfigError, ModelError, TrainingError
from tunesmith.experience.trie import Trie
from tunesmith.model.attention import PLAN_ATTENTION
from tunesmith.trainer.checkpointing import checkpointed_layers, enable_checkpointing
from tunesmith.trainer.metrics import Update, build_metrics, check_finite
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.schedule import compute_learning_rate
from tunesmith.trainer.step import Totals, run_batch
from tunesmith.types import Sample

logger = logging.getLogger(__name__)

MISMATCH_CAUSES = (
    "likely causes: sampling settings the trainer does not know of, weights changed between sampling and training, "
    "keys and values of older weights in the engine's cache, or parameters too coarse for this model (try "
    "model.dtype=float32)"
)


class Trainer:
    """Optimizer state and step counter of one model under one algorithm."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSection,
        algorithm: AlgorithmSection,
        *,
        max_model_len: int,
        num_total_steps: int,
        reference_model: PreTrainedModel | None = None,
    ) -> None:
        self._algorithm = resolve_algorithm(algorithm)
        self._settings = settings
        self._max_model_len = max_model_len
        self._num_total_steps = num_total_steps
        self._check_reference(reference_model)
        for one in (model, reference_model):
            if one is not None and one.config._attn_implementation != PLAN_ATTENTION:
                raise ModelError(f"{type(one).__name__} was not prepared with use_plan_attention")
        self._model = model.eval()
        self._reference_model = None if reference_model is None else reference_model.eval()
        if settings.has_gradient_checkpointing:
            enable_checkpointing(model)
        self._optimizer = MasterAdamW(model, settings)
        self.num_steps = 0
        """Steps taken, empty ones included; the learning rate follows it."""

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Make one update per minibatch, or none when the samples train no token; return metrics.

        Raises TrainingError, with the parameters as they were before the failing update, when the loss or the gradient
        is not finite or when the sampler's logprobs are too far from the trainer's. That mismatch is measured on the
        first minibatch. An empty step counts as a step: the learning rate goes on as if it had trained.
        """
        learning_rate = compute_learning_rate(
            self._settings, step=self.num_steps, num_total_steps=self._num_total_steps
        )
        updates: list[Update] = []
        for minibatch in _split_minibatches(samples, self._settings.num_minibatches):
            rows = self._pack(minibatch)
            if rows:
                updates.append(self._update(minibatch, rows, learning_rate, is_first=not updates))
        self.num_steps += 1
        return build_metrics(updates) | {"train/learning_rate": learning_rate}

    @torch.no_grad()
    def compute_loss(self, samples: Sequence[Sample]) -> float:
        """The loss of the samples as one batch; nothing is updated."""
        rows = self._pack(samples)
        if not rows:
            raise ValueError(f"none of the {len(samples)} samples has a sampled token, so there is no loss to compute")
        return self._run(samples, rows)["loss"].item()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the parameters; tensors are not copied."""
        return {"num_steps": self.num_steps, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, bit for bit; the model's parameters must be those of that moment."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]

    def _pack(self, samples: Sequence[Sample]) -> list[Trie]:
        return pack_samples(
            samples,
            max_tokens_per_row=self._settings.max_tokens_per_row,
            has_prefix_sharing=self._settings.has_prefix_sharing,
            hidden_size=self._model.config.get_text_config().hidden_size,
        )

    def _update(self, samples: Sequence[Sample], rows: Sequence[Trie], learning_rate: float, is_first: bool) -> Update:
        self._optimizer.clear_gradients()
        has_checkpointing = self._settings.has_gradient_checkpointing
        with checkpointed_layers(self._model) if has_checkpointing else nullcontext():
            totals = self._run(samples, rows)
        grad_norm = self._optimizer.compute_grad_norm()
        update = Update(
            totals={name: value.item() for name, value in totals.items()},
            grad_norm=grad_norm.item(),
            num_tokens=sum(row.num_tokens for row in rows),
            num_flat_tokens=sum(row.num_flat_tokens for row in rows),
            num_trained_tokens=sum(len(row.parent_E) for row in rows),
        )
        try:
            check_finite(update)
            if is_first and not self._algorithm.is_supervised:
                self._check_mismatch(update)
        except TrainingError:
            self._optimizer.clear_gradients()
            raise
        self._optimizer.update(
            learning_rate=learning_rate, grad_norm=grad_norm, max_grad_norm=self._settings.max_grad_norm
        )
        return update

    def _run(self, samples: Sequence[Sample], rows: Sequence[Trie]) -> Totals:
        return run_batch(
            self._model,
            samples,
            rows,
            self._algorithm,
            norm_length=self._max_model_len,
            chunk_tokens=self._settings.logprob_chunk_tokens,
            reference_model=self._reference_model,
            collect_gradients=self._optimizer.collect_gradients,
        )

    def _check_reference(self, reference_model: PreTrainedModel | None) -> None:
        kl_coef = self._algorithm.kl_coef
        if kl_coef > 0 and self._algorithm.is_supervised:
            raise ConfigError(
                f"kl_coef={kl_coef} needs sampled tokens, and {self._algorithm.name!r} has none: set it to 0"
            )
        if (kl_coef > 0) != (reference_model is not None):
            given = "no reference model was given" if reference_model is None else "a reference model was given"
            raise ConfigError(f"kl_coef={kl_coef}, but {given}: a KL term needs one, and nothing else does")

    def _check_mismatch(self, update: Update) -> None:
        mismatch, limits = update.mismatch_kl, self._settings
        if mismatch > limits.mismatch_stop:
            raise TrainingError(
                f"sampler and trainer disagree: KL {mismatch:.3g} a token is above "
                f"trainer.mismatch_stop={limits.mismatch_stop:g}; {MISMATCH_CAUSES}"
            )
        if mismatch > limits.mismatch_warn:
            logger.warning(
                "sampler and trainer disagree: KL %.3g a token is above trainer.mismatch_warn=%g; %s",
                mismatch, limits.mismatch_warn, MISMATCH_CAUSES,
            )  # fmt: skip


def _split_minibatches(samples: Sequence[Sample], num_minibatches: int) -> list[list[Sample]]:
    """Deal whole groups out in turn; fewer groups than minibatches make fewer minibatches."""
    turn_of_group: dict[int, int] = {}
    minibatches: list[list[Sample]] = [[] for _ in range(num_minibatches)]
    for sample in samples:
        turn = turn_of_group.setdefault(sample.group_index, len(turn_of_group))
        minibatches[turn % num_minibatches].append(sample)
    return [minibatch for minibatch in minibatches if minibatch]
