"""The trainer: one step from samples to updated weights.

The scoring pass computes the inputs of every trained token of a minibatch; the loss pass accumulates the gradient row
by row. Parameters are updated only after all rows are done and loss and gradient norm are finite. They are the
sampler's own, updated in place; the model stays in eval mode, so sampler and trainer compute the same function. Only
an adapter's dropout is active, in the loss pass of supervised fine-tuning, which has no sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.kl import adapt_kl_coef
from tunesmith.algorithms.own_functions import OwnFunctions
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.errors import TrainingError
from tunesmith.experience.trie import Trie
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.model.adapters.adapter import active_dropout, find_dropouts
from tunesmith.model.device_errors import explain_device_error, is_device_error
from tunesmith.model.forward.attention import check_plan_attention
from tunesmith.model.forward.logprobs import choose_chunk_tokens
from tunesmith.model.forward.rotary import fix_rotary_frequencies
from tunesmith.model.torch_modes import default_modes
from tunesmith.model.value_model import ValueModel
from tunesmith.trainer.critic import Critic
from tunesmith.trainer.host_work import HostWork
from tunesmith.trainer.layers.compiled_layers import compiled_layers, find_compilable
from tunesmith.trainer.layers.gradient_checkpointing import checkpointed_layers, enable_checkpointing
from tunesmith.trainer.layers.row_graphs import RowGraphs, uses_row_graphs
from tunesmith.trainer.loss_pass import run_loss_pass
from tunesmith.trainer.lr_schedule import compute_learning_rate
from tunesmith.trainer.metrics import (
    Total,
    Update,
    build_metrics,
    build_token_metrics,
    check_finite,
    check_mismatch,
    count_row_tokens,
    read_totals,
)
from tunesmith.trainer.optimizer import compute_checksum
from tunesmith.trainer.packing import pack_samples, split_minibatches
from tunesmith.trainer.policy_versions import gather_versions, has_older_tokens
from tunesmith.trainer.reference import Reference, check_dropouts, check_extra_model
from tunesmith.trainer.scoring_pass import (
    PreparedUpdate,
    ProximalScores,
    ScoringModels,
    StepTerms,
    compute_step_terms,
    prepare_update,
    scatter_to_samples,
    score_logprobs,
)
from tunesmith.trainer.sharding.sharded_adamw import build_optimizer
from tunesmith.trainer.sharding.sharded_model import get_local
from tunesmith.trainer.token_masks import attach_token_masks
from tunesmith.trainer.token_terms import can_weigh_in_loss_pass
from tunesmith.types import Sample

LESS_MEMORY = (
    "lower trainer.max_tokens_per_row, trainer.logprob_chunk_tokens or engine.kv_cache_gib, "
    "set trainer.has_gradient_checkpointing=true, or set trainer.has_row_graphs=false"
)
CHANGE_CHECK_INTERVAL_STEPS = 10
"""Steps between checks whether an update changed any weight; each check synchronizes with the device."""


class Trainer:
    """Trains one model with one algorithm; owns the optimizer state and the step counter."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainerSection,
        algorithm: AlgorithmSection,
        *,
        max_model_len: int,
        num_total_steps: int,
        reference_model: PreTrainedModel | None = None,
        teacher_model: PreTrainedModel | None = None,
        critic_model: ValueModel | None = None,
        dropout_seed: int = 0,
        has_separate_sampler: bool = False,
        own_functions: OwnFunctions = OwnFunctions(),
        grammars: GrammarCompiler | None = None,
        ranks: Ranks = Ranks(),
        has_sharded_gradients: bool | None = None,
    ) -> None:
        """With `has_separate_sampler`, one with other weights or another implementation, every token is off-policy:
        importance weights apply as to replayed groups. `grammars` are the sampler's.

        On several ranks each trains its own samples, and all call the same methods in the same order; the update, its
        metrics and its errors are those of all samples.
        """
        self._ranks = ranks
        self._algorithm = resolve_algorithm(algorithm, own=own_functions)
        self._settings, self._grammars = settings, grammars
        self._norm_length = algorithm.norm_length or max_model_len
        self._dropouts, self._dropout_seed = find_dropouts(model), dropout_seed
        check_dropouts(self._dropouts, self._algorithm)
        self._has_separate_sampler, self._num_total_steps = has_separate_sampler, num_total_steps
        check_extra_model(self._algorithm, "reference", reference_model)
        check_extra_model(self._algorithm, "teacher", teacher_model)
        check_extra_model(self._algorithm, "values", critic_model)
        models = [each for each in (model, reference_model, teacher_model) if each is not None]
        check_plan_attention(*models)
        fix_rotary_frequencies(*models, critic_model, max_model_len=max_model_len)
        self._model = model.eval()
        self._critic = None if critic_model is None else Critic(critic_model, algorithm.critic, settings, ranks)
        self._reference: Reference | None = None
        if reference_model is not None:
            self._reference = Reference(reference_model.eval(), refresh_steps=algorithm.reference_refresh_steps)
        self._scoring_models = ScoringModels(
            reference=reference_model,
            reference_state=self._reference,
            teacher=None if teacher_model is None else teacher_model.eval(),
            score_values=None if self._critic is None else self._critic.score,
        )
        if settings.has_gradient_checkpointing:
            enable_checkpointing(model)
        self._compiled = find_compilable(*models) if settings.has_compiled_layers else ()
        self._chunk_tokens = settings.logprob_chunk_tokens or choose_chunk_tokens(model)
        self._optimizer = build_optimizer(model, settings, ranks, has_sharded_gradients=has_sharded_gradients)
        is_compiled, has_dropout = bool(self._compiled), bool(self._dropouts)
        has_graphs = uses_row_graphs(model, settings, is_compiled=is_compiled, has_dropout=has_dropout)
        self._graphs = RowGraphs(model) if has_graphs and self._optimizer.stream is None else None
        self.num_steps = 0
        """Steps made, empty ones included; determines the learning rate."""
        self._host_work = HostWork(model.device)
        self._num_cpu_threads = torch.get_num_threads()

    def step(
        self,
        samples: Sequence[Sample],
        *,
        policy_version: int | None = None,
        host_work: Sequence[Callable[[], None]] = (),
    ) -> dict[str, float]:
        """Make one update per minibatch, or none if the samples have no trained token; return metrics.

        `policy_version` is the newest version, whose tokens are checked for mismatch; None means the newest in the
        samples. Raises TrainingError, with the parameters as before the failing update, when the loss or the gradient
        is not finite or when the mismatch of sampler and trainer logprobs exceeds `trainer.mismatch_stop`. The mismatch
        is measured on the first minibatch. Also raises TrainingError when the device is lost or out of memory. An empty
        step counts as a step in the learning-rate schedule. `host_work` are pieces of work of the host, done in order
        while the device computes the gradient of the first update.
        """
        try:
            with default_modes(num_threads=self._num_cpu_threads):
                return self._step(samples, policy_version, host_work)
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            raise TrainingError(explain_device_error(error, work="an update", advice=LESS_MEMORY)) from error

    def _step(
        self, samples: Sequence[Sample], policy_version: int | None, host_work: Sequence[Callable[[], None]]
    ) -> dict[str, float]:
        learning_rate = compute_learning_rate(
            self._settings, step=self.num_steps, num_total_steps=self._num_total_steps
        )
        samples = attach_token_masks(samples, self._grammars)
        policy_version, groups = gather_versions(samples, self._ranks, policy_version)
        proximal = self._score_proximal_policy(samples, policy_version)
        step_terms = self._compute_step_terms(samples, proximal)
        updates: list[Update] = []
        self._host_work.begin(host_work)
        for indices in split_minibatches(samples, self._settings.num_minibatches, groups=groups):
            minibatch = [samples[index] for index in indices]
            rows = self._pack(minibatch)
            if self._ranks.is_any(bool(rows)):
                part = None if proximal is None else proximal.select(indices)
                terms = None if step_terms is None else step_terms.select(indices)
                number = len(updates)
                update = self._update(minibatch, rows, part, terms, learning_rate, policy_version, number=number)
                updates.append(update)
                self._adapt_kl_coef(update, minibatch)
        self._host_work.finish()
        self.num_steps += 1
        metrics = build_metrics(updates) | {"train/learning_rate": learning_rate}
        return metrics if self._reference is None else metrics | self._reference.advance(self._model, self.num_steps)

    @torch.no_grad()
    def compute_loss(self, samples: Sequence[Sample]) -> float:
        """The loss of the samples as one batch, without an update."""
        rows = self._pack(samples)
        if not rows:
            raise ValueError(f"none of the {len(samples)} samples has a trained token, so there is no loss to compute")
        return self._run(samples, rows, self._prepare(samples, rows))["train/loss"].value.item()

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs in addition to the parameters; tensors are not copied."""
        kl_coef = self._algorithm.kl_coef
        state = {"num_steps": self.num_steps, "kl_coef": kl_coef, "optimizer": self._optimizer.state_dict()}
        if self._reference is not None:
            state |= self._reference.state_dict()
        return state if self._critic is None else state | {"critic": self._critic.state_dict()}

    def compute_checksum(self) -> int:
        """A checksum of the trained weights, of this rank's part if they are sharded."""
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return compute_checksum(get_local(each) if isinstance(each, DTensor) else each for each in trainable)

    def take_times(self) -> dict[str, float]:
        """Seconds since the last call in which this rank waited for others and communicated; {} on a single rank."""
        own, critic = self._optimizer.take_times(), {} if self._critic is None else self._critic.take_times()
        return {name: seconds + critic.get(name, 0.0) for name, seconds in own.items()}

    def count_state_bytes(self) -> int:
        """Approximate size of `state_dict` on several ranks, without gathering it."""
        return self._optimizer.count_state_bytes() + (0 if self._critic is None else self._critic.count_state_bytes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; with the parameters of the same step, training continues bit for bit."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        if self._algorithm.kl_adaptive is not None:
            self._algorithm = replace(self._algorithm, kl_coef=state["kl_coef"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])
        if self._reference is not None:
            self._reference.load_state_dict(state)

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    @property
    def num_minibatches(self) -> int:
        return self._settings.num_minibatches

    @property
    def hidden_size(self) -> int:
        return int(self._model.config.get_text_config().hidden_size)

    def _pack(self, samples: Sequence[Sample]) -> list[Trie]:
        return pack_samples(
            samples,
            max_tokens_per_row=self._settings.max_tokens_per_row,
            has_prefix_sharing=self._settings.has_prefix_sharing,
            hidden_size=self.hidden_size,
        )

    def _score_proximal_policy(self, samples: Sequence[Sample], policy_version: int | None) -> ProximalScores | None:
        """Logprobs under the policy at the start of the step, if the step has importance weights or a mask."""
        algorithm = self._algorithm
        is_weighted = self._has_importance_weights(samples, policy_version)
        if is_weighted and self._weighs_in_loss_pass():
            return ProximalScores(logprobs=None, is_weighted=True)
        rows = self._pack(samples) if is_weighted or algorithm.correction.mask is not None else []
        if not self._ranks.is_any(bool(rows)):
            return None
        with compiled_layers(*self._compiled):
            logprobs_R = score_logprobs(self._model, samples, rows, chunk_tokens=self._chunk_tokens)
        return ProximalScores(logprobs=scatter_to_samples(logprobs_R, samples, rows), is_weighted=is_weighted)

    def _has_importance_weights(self, samples: Sequence[Sample], policy_version: int | None) -> bool:
        has_older = self._ranks.is_any(has_older_tokens(samples, policy_version))
        is_off_policy = self._has_separate_sampler or has_older
        return self._algorithm.uses_importance_weights(has_older_tokens=is_off_policy)

    def _weighs_in_loss_pass(self) -> bool:
        """Whether the loss pass computes the weights: its policy is the proximal one in a step of one update."""
        is_one_update = self._settings.num_minibatches == 1 and self._critic is None
        return is_one_update and can_weigh_in_loss_pass(self._algorithm)

    def _compute_step_terms(self, samples: Sequence[Sample], proximal: ProximalScores | None) -> StepTerms | None:
        """Values, advantages and returns by the critic before the first update; None without a critic."""
        if self._critic is None:
            return None
        rows = self._pack(samples)
        if not self._ranks.is_any(bool(rows)):
            return None
        with compiled_layers(*self._compiled):
            return compute_step_terms(
                self._model,
                samples,
                rows,
                self._algorithm,
                chunk_tokens=self._chunk_tokens,
                scoring_models=self._scoring_models,
                proximal=proximal,
                step=self.num_steps,
                ranks=self._ranks,
            )

    def _update(
        self,
        samples: Sequence[Sample],
        rows: Sequence[Trie],
        proximal: ProximalScores | None,
        step_terms: StepTerms | None,
        learning_rate: float,
        policy_version: int | None,
        *,
        number: int,
    ) -> Update:
        """Update `number` of the step, from 0."""
        is_first = number == 0
        self._optimizer.clear_gradients()
        has_checkpointing = self._settings.has_gradient_checkpointing
        with compiled_layers(*self._compiled):
            prepared = self._prepare(samples, rows, proximal, step_terms, policy_version, is_first=is_first)
            with checkpointed_layers(self._model) if has_checkpointing else nullcontext(), self._active_dropout(number):
                totals = self._run(samples, rows, prepared)
        self._host_work.finish()
        grad_norm = self._optimizer.compute_grad_norm()
        tensors = [grad_norm, *(total.value for total in totals.values())]
        values = torch.stack([value.double() for value in tensors]).tolist()  # the only device synchronization
        host_totals = read_totals(totals, values[1:], self._ranks)
        metrics = build_token_metrics(host_totals, prepared.counts, is_first=is_first)
        metrics |= count_row_tokens(rows, self._ranks) | prepared.metrics | {"train/grad_norm": values[0]}
        if "train/kl" in host_totals:
            metrics["train/kl_coef"] = self._algorithm.kl_coef
        update = Update(metrics=metrics, grad_norm=values[0])
        try:
            check_finite(update)
            if is_first and not self._algorithm.is_supervised:
                check_mismatch(update, self._settings, has_console=self._ranks.is_first)
            update.metrics.update(self._update_critic(rows, prepared))
        except TrainingError:
            self._optimizer.clear_gradients()
            raise
        if self._critic is not None and self.num_steps < self._critic.num_warmup_steps:
            self._optimizer.clear_gradients()
            return update
        is_checked = self.num_steps % CHANGE_CHECK_INTERVAL_STEPS == 0
        before = self._optimizer.sample_weights() if is_checked else None
        self._optimizer.update(
            learning_rate=learning_rate, grad_norm=grad_norm, max_grad_norm=self._settings.max_grad_norm
        )
        if before is not None:
            update.metrics["train/changed_ratio"] = self._optimizer.compute_changed_ratio(before).item()
            update.metrics["train/relative_update"] = self._optimizer.compute_relative_update(before).item()
        return update

    def _update_critic(self, rows: Sequence[Trie], prepared: PreparedUpdate) -> dict[str, float]:
        if self._critic is None:
            return {}
        assert prepared.values_R is not None and prepared.returns_R is not None
        return self._critic.update(rows, prepared.values_R, prepared.returns_R)

    def _prepare(
        self,
        samples: Sequence[Sample],
        rows: Sequence[Trie],
        proximal: ProximalScores | None = None,
        step_terms: StepTerms | None = None,
        policy_version: int | None = None,
        *,
        is_first: bool = False,
    ) -> PreparedUpdate:
        return prepare_update(
            self._model,
            samples,
            rows,
            self._algorithm,
            norm_length=self._norm_length,
            chunk_tokens=self._chunk_tokens,
            scoring_models=self._scoring_models,
            proximal=proximal,
            step_terms=step_terms,
            newest_version=policy_version,
            is_first=is_first,
            step=self.num_steps,
            ranks=self._ranks,
        )

    def _run(self, samples: Sequence[Sample], rows: Sequence[Trie], prepared: PreparedUpdate) -> dict[str, Total]:
        return run_loss_pass(
            self._model,
            samples,
            rows,
            self._algorithm,
            prepared.inputs,
            chunk_tokens=self._chunk_tokens,
            is_compiled=bool(self._compiled),
            graphs=self._graphs if torch.is_grad_enabled() else None,
            stream=self._optimizer.stream if torch.is_grad_enabled() else None,
            after_row=self._host_work.advance,
        )

    def _active_dropout(self, number: int) -> AbstractContextManager[None]:
        """Context with the adapter's dropout active, seeded by the step and the update in it."""
        (seed,) = np.random.SeedSequence((self._dropout_seed, self.num_steps, number)).generate_state(1).tolist()
        return active_dropout(self._dropouts, seed=seed, device=self._model.device)

    def _adapt_kl_coef(self, update: Update, samples: Sequence[Sample]) -> None:
        """Adapt the KL coefficient to the KL of the update."""
        adaptive, kl = self._algorithm.kl_adaptive, update.metrics.get("train/kl")
        if adaptive is not None and kl is not None:
            num_trajectories = len({sample.trajectory_index for sample in samples if not sample.is_expert})
            kl_coef = adapt_kl_coef(
                self._algorithm.kl_coef,
                kl=kl,
                target=adaptive.target,
                num_trajectories=sum(self._ranks.all_gather_objects(num_trajectories)),
                horizon=adaptive.horizon,
            )
            self._algorithm = replace(self._algorithm, kl_coef=kl_coef)
