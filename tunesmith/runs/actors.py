"""Load the actors of a run: the policy, its auxiliary models and the user's functions."""

from __future__ import annotations

from tunesmith.cluster.ranks import Ranks
from tunesmith.config import RunConfig
from tunesmith.model.torch_modes import set_num_threads
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.runner import Agent
from tunesmith.runs.policy import BuildModel, Policy, load_auxiliary, load_policy
from tunesmith.types import JudgeType, WorkflowType


def load_actors(
    config: RunConfig,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    ranks: Ranks = Ranks(),
    has_rollouts: bool = True,
    has_trainer: bool = True,
) -> tuple[Policy, Actors]:
    """Load the models of a run; the policy and the actors share one engine and one endpoint.

    A rank that runs no rollouts loads no auxiliary models; one without a trainer keeps no memory for it.
    """
    set_num_threads(config.num_cpu_threads)
    is_sharded = config.cluster.has_sharded_weights and not ranks.is_alone
    policy = load_policy(
        config.model,
        config.engine,
        build_model=build_model,
        sharded_over=ranks if is_sharded else None,
        has_trainer=has_trainer,
    )
    auxiliaries = {
        name: load_auxiliary(section, config.engine, device=config.model.device, build_model=build_model)
        for name, section in (config.auxiliary_models if has_rollouts else {}).items()
    }
    actors = Actors(
        engine=policy.engine,
        service=policy.service,
        auxiliary_models={name: auxiliary.source for name, auxiliary in auxiliaries.items()},
        auxiliary_engines=[each.engine for each in auxiliaries.values() if each.engine is not None],
        agent=Agent(
            workflow=workflow,
            judge=judge,
            timeout_s=config.rollout.timeout_s,
            max_attempts=1 if config.serve is None else config.serve.max_attempts,
        ),
        max_concurrency=config.rollout.max_concurrency,
        http_port=config.rollout.http_port,
        max_body_bytes=int(config.rollout.max_body_mib * 2**20),
    )
    return policy, actors
