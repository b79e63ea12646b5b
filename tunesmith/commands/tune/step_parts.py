"""The trainer, which every rank that trains builds."""

from __future__ import annotations

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.own_functions import OwnFunctions
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import RunConfig
from tunesmith.runs.extra_models import load_extra_models
from tunesmith.runs.policy import Policy
from tunesmith.trainer.trainer import Trainer


def build_trainer(
    config: RunConfig, algorithm: Algorithm, functions: OwnFunctions, policy: Policy, ranks: Ranks, *, total_steps: int
) -> Trainer:
    """The trainer of the policy's own weights, with the extra models of the algorithm."""
    extra = load_extra_models(algorithm, config.algorithm, config.model, policy=policy.model)
    return Trainer(
        policy.model,
        config.trainer,
        config.algorithm,
        max_model_len=config.model.max_model_len,
        num_total_steps=total_steps,
        reference_model=extra.reference,
        teacher_model=extra.teacher,
        critic_model=extra.critic,
        has_separate_sampler=config.engine.has_separate_sampler,
        own_functions=functions,
        grammars=policy.engine.grammars,
        ranks=ranks,
        has_sharded_gradients=config.cluster.has_sharded_gradients,
    )
