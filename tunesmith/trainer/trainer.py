"""The trainer: one step from samples to updated weights.

What is here has state: the optimizer, the step counter, the critic, the adaptive KL coefficient, the refreshed
reference. The gradient of an update is a function of model, algorithm and samples (`update.py`). Parameters are updated
only after all rows are done and loss and gradient norm are finite. They are the sampler's own, updated in place; the
model stays in eval mode, so sampler and trainer compute the same function. Only an adapter's dropout is active, in the
loss pass of supervised fine-tuning, which has no sampler.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import Algorithm, resolve_algorithm
from tunesmith.algorithms.kl import adapt_kl_coef
from tunesmith.algorithms.losses.policy import compute_sft_losses
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.errors import ConfigError, TrainingError
from tunesmith.experience.samples import Trie
from tunesmith.garbage import are_objects_frozen, freeze_more
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.model.adapters.adapter import active_dropout, find_dropouts
from tunesmith.model.device_errors import explain_device_error, is_device_error
from tunesmith.model.experts import ROUTING, RowRouting, find_routers
from tunesmith.model.forward.attention import check_plan_attention, fix_rotary_frequencies
from tunesmith.model.forward.exact import deterministic_algorithms
from tunesmith.model.forward.logprobs import choose_chunk_tokens
from tunesmith.model.torch_modes import default_modes, is_exact
from tunesmith.model.value_model import ValueModel
from tunesmith.trainer.batch import attach_token_masks
from tunesmith.trainer.critic import Critic
from tunesmith.trainer.layers.compiled_layers import can_compile
from tunesmith.trainer.layers.gradient_checkpointing import enable_checkpointing
from tunesmith.trainer.layers.row_graphs import RowGraphs, uses_row_graphs
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.metrics import build_metrics, check_finite, check_mismatch
from tunesmith.trainer.optimizer import compute_checksum, compute_learning_rate
from tunesmith.trainer.packing import split_minibatches
from tunesmith.trainer.reference import Reference, check_dropouts, check_extra_model
from tunesmith.trainer.scoring_pass import ScoringModels
from tunesmith.trainer.sharding.sharded_adamw import build_optimizer
from tunesmith.trainer.sharding.sharded_model import get_local
from tunesmith.trainer.tree_attention.tile_schedule import PADDING
from tunesmith.trainer.update import (
    StepScores,
    compute_gradient,
    gather_versions,
    prepare_update,
    read_update,
    score_step,
)
from tunesmith.types import Sample

LESS_MEMORY = (
    "lower trainer.max_tokens_per_row, trainer.logprob_chunk_tokens or engine.kv_cache_gib, "
    "set trainer.has_gradient_checkpointing=true, or set trainer.has_row_graphs=false"
)
CHANGE_CHECK_INTERVAL_STEPS = 10
"""Steps between checks whether an update changed any weight; each check synchronizes with the device."""
FREEZE_CALL = 3
"""Update after which everything is compiled: what is alive then lives as long as the run."""
FULL_INTERVAL = 10
"""Updates between collections of all generations; the collector would start one by itself after eleven."""


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
        resolved: Algorithm | None = None,
        grammars: GrammarCompiler | None = None,
        ranks: Ranks = Ranks(),
        has_sharded_gradients: bool | None = None,
    ) -> None:
        """With `has_separate_sampler`, one with other weights or another implementation, every token is off-policy:
        importance weights apply as to replayed groups. `grammars` are the sampler's. `resolved` is the algorithm of the
        section, if it has functions of the user.

        On several ranks each trains its own samples, and all call the same methods in the same order; the update, its
        metrics and its errors are those of all samples.
        """
        self._ranks = ranks
        self._algorithm = resolved or resolve_algorithm(algorithm)
        self._settings, self._grammars = settings, grammars
        self._dropouts, self._dropout_seed = find_dropouts(model), dropout_seed
        check_dropouts(self._dropouts, self._algorithm)
        self._num_total_steps = num_total_steps
        check_extra_model(self._algorithm, "reference", reference_model)
        check_extra_model(self._algorithm, "teacher", teacher_model)
        check_extra_model(self._algorithm, "values", critic_model)
        models = [each for each in (model, reference_model, teacher_model) if each is not None]
        check_plan_attention(*models)
        fix_rotary_frequencies(*models, critic_model, max_model_len=max_model_len)
        self.model, self.num_minibatches = model.eval(), settings.num_minibatches
        self.hidden_size = int(model.config.get_text_config().hidden_size)
        self._critic = None if critic_model is None else Critic(critic_model, algorithm.critic, settings, ranks)
        self._reference: Reference | None = None
        if reference_model is not None:
            self._reference = Reference(reference_model.eval(), refresh_steps=algorithm.reference_refresh_steps)
        if settings.has_gradient_checkpointing:
            enable_checkpointing(model)
        longest = max(settings.max_tokens_per_row, max_model_len)
        for each in filter(None, (model, reference_model)):  # the reference has the routes of the policy
            if find_routers(each) or settings.routing_replay or settings.router_aux_loss_coef:
                setattr(each, ROUTING, RowRouting(each, settings, max_tokens=longest + max(PADDING, longest // 8)))
        distinct = tuple({id(each): each for each in models}.values())
        compiled = distinct if settings.has_compiled_layers and all(map(can_compile, distinct)) else ()
        if is_exact() and (self._dropouts or not compiled):
            reason = "it does not work with model.lora.dropout" if self._dropouts else "layers cannot be fused"
            raise ConfigError(f"model.numerics=exact: {reason}; leave it at fast")
        self._optimizer = build_optimizer(model, settings, ranks, has_sharded_gradients=has_sharded_gradients)
        has_graphs = uses_row_graphs(model, settings, is_compiled=bool(compiled), has_dropout=bool(self._dropouts))
        self._setup = PassSetup(
            model=model,
            settings=settings,
            norm_length=algorithm.norm_length or max_model_len,
            chunk_tokens=settings.logprob_chunk_tokens or choose_chunk_tokens(model),
            scoring_models=ScoringModels(
                reference=self._reference,
                teacher=None if teacher_model is None else teacher_model.eval(),
                score_values=None if self._critic is None else self._critic.score,
            ),
            has_separate_sampler=has_separate_sampler,
            compiled=compiled,
            graphs=RowGraphs(model) if has_graphs and self._optimizer.stream is None else None,
            stream=self._optimizer.stream,
            ranks=ranks,
        )
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
            modes = default_modes(num_threads=self._num_cpu_threads, device=self.model.device)
            with modes, deterministic_algorithms():
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
        scores = score_step(self._setup, self._algorithm, samples, policy_version=policy_version, step=self.num_steps)
        updates: list[dict[str, float]] = []
        self._host_work.begin(host_work)
        for indices in split_minibatches(samples, self.num_minibatches, groups=groups):
            minibatch = [samples[index] for index in indices]
            rows = self._setup.pack(minibatch)
            if self._ranks.is_any(bool(rows)):
                update = self._update(
                    minibatch,
                    rows,
                    scores.select(indices),
                    learning_rate=learning_rate,
                    policy_version=policy_version,
                    number=len(updates),
                )
                updates.append(update)
        self._host_work.finish()
        self.num_steps += 1
        metrics = build_metrics(updates) | {"train/learning_rate": learning_rate}
        return metrics if self._reference is None else metrics | self._reference.advance(self.model, self.num_steps)

    @torch.no_grad()
    def compute_loss(self, samples: Sequence[Sample]) -> float:
        """The loss of the samples as one batch, without an update; of `sft_is` and `sft_phi` their cross entropy.

        Where a loss weighs cross entropy by the probability p, it is -p log p in value: small for p near 0 as for p
        near 1, so a lower loss is not a better model.
        """
        rows = self._setup.pack(samples)
        if not rows:
            raise ValueError(f"none of the {len(samples)} samples has a trained token, so there is no loss to compute")
        algorithm = self._algorithm
        if algorithm.is_supervised and not algorithm.entry.needs_sequences:
            algorithm = replace(algorithm, compute_losses=compute_sft_losses)
        prepared = prepare_update(self._setup, algorithm, samples, rows, step=self.num_steps)
        totals = run_loss_pass(self._setup, algorithm, samples, rows, prepared.inputs)
        return totals["train/loss"][1].item()

    def state_dict(self) -> dict[str, Any]:
        """Everything that resuming needs in addition to the parameters; tensors are not copied."""
        kl_coef = self._algorithm.kl_coef
        state = {"num_steps": self.num_steps, "kl_coef": kl_coef, "optimizer": self._optimizer.state_dict()}
        if self._reference is not None:
            state |= self._reference.state_dict()
        return state if self._critic is None else state | {"critic": self._critic.state_dict()}

    def compute_checksum(self) -> int:
        """A checksum of the trained weights, of this rank's part if they are sharded."""
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return compute_checksum(get_local(each) if isinstance(each, DTensor) else each for each in trainable)

    def take_times(self) -> dict[str, float]:
        """Seconds since the last call in which this rank waited for others and communicated; {} on a single rank."""
        own, critic = self._optimizer.take_times(), {} if self._critic is None else self._critic.optimizer.take_times()
        return {name: seconds + critic.get(name, 0.0) for name, seconds in own.items()}

    def count_state_bytes(self) -> int:
        """Approximate size of `state_dict` on several ranks, without gathering it."""
        return self._optimizer.count_state_bytes() + (0 if self._critic is None else self._critic.count_state_bytes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; with the parameters of the same step, training continues bit for bit."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        if self._algorithm.section.kl_adaptive is not None:
            self._algorithm = replace(self._algorithm, kl_coef=state["kl_coef"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])
        if self._reference is not None:
            self._reference.load_state_dict(state)

    def _update(
        self,
        samples: Sequence[Sample],
        rows: Sequence[Trie],
        scores: StepScores,
        *,
        learning_rate: float,
        policy_version: int,
        number: int,
    ) -> dict[str, float]:
        """Make update `number` of the step, from 0; return its metrics."""
        is_first = number == 0
        (seed,) = np.random.SeedSequence((self._dropout_seed, self.num_steps, number)).generate_state(1).tolist()
        self._optimizer.clear_gradients()
        totals, prepared = compute_gradient(
            self._setup,
            self._algorithm,
            samples,
            rows,
            scores,
            policy_version=policy_version,
            is_first=is_first,
            step=self.num_steps,
            dropout=active_dropout(self._dropouts, seed=seed, device=self.model.device),
            after_row=self._host_work.advance,
        )
        self._host_work.finish()
        grad_norm = self._optimizer.compute_grad_norm()
        metrics = read_update(self._setup, self._algorithm, totals, prepared, rows, grad_norm, is_first=is_first)
        try:
            check_finite(metrics)
            if is_first and not self._algorithm.is_supervised:
                check_mismatch(metrics, self._settings, has_console=self._ranks.is_first)
            if self._critic is not None:
                inputs = prepared.inputs
                assert inputs.values_E is not None and inputs.returns_E is not None
                metrics |= self._critic.update(rows, inputs.values_E, inputs.returns_E)
        except TrainingError:
            self._optimizer.clear_gradients()
            raise
        if self._critic is not None and self.num_steps < self._critic.warmup_steps:
            self._optimizer.clear_gradients()
            return metrics
        is_checked = self.num_steps % CHANGE_CHECK_INTERVAL_STEPS == 0
        before = self._optimizer.sample_weights() if is_checked else None
        self._optimizer.update(
            learning_rate=learning_rate, grad_norm=grad_norm, max_grad_norm=self._settings.max_grad_norm
        )
        if before is not None:
            metrics |= {name: value.item() for name, value in self._optimizer.measure_change(before).items()}
        self._adapt_kl_coef(metrics, samples)
        return metrics

    def _adapt_kl_coef(self, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        adaptive, kl = self._algorithm.section.kl_adaptive, metrics.get("train/kl")
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


class HostWork:
    """What the host does while the device computes the gradient of the first update of a step.

    The host can queue about a thousand kernels, so it is never far ahead of the device: 0.1 s on an H200. Work is
    therefore done in pieces, one after each row that was queued. Python's garbage collector is one of them: it would
    stop the host for 10 to 500 ms at a time, at moments that differ between ranks, which wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._num_calls = 0
        self._pieces: list[Callable[[], None]] = []

    def begin(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Plan these pieces of work and, on a GPU, a collection of garbage."""
        self._pieces = [*pieces, *([self.collect_garbage] if self._is_cuda else [])]

    def advance(self) -> None:
        """Do the next piece, if one is left: a row was queued."""
        if self._pieces:
            self._pieces.pop(0)()

    def finish(self) -> None:
        """Do what is left: all rows were queued."""
        while self._pieces:
            self.advance()

    def collect_garbage(self) -> None:
        """Collect young objects, at times all; objects alive at the third update are exempt from then on.

        Nothing is collected unless the objects of libraries are exempt, which take a second.
        """
        if not are_objects_frozen():
            return
        self._num_calls += 1
        gc.collect(2 if self._num_calls == FREEZE_CALL or self._num_calls % FULL_INTERVAL == 0 else 1)
        if self._num_calls == FREEZE_CALL:
            freeze_more()
