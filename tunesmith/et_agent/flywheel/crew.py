"""The roles of a flywheel, loaded once: models with their engines, functions, the judge, and the environment.

A model in a role has a session of its own in each attempt, with a seed of its own; requests carry their sampling
parameters, so nothing is shared between attempts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.config import FlywheelConfig
from tunesmith.config.et_agent import OWN_MODEL
from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import Transcript
from tunesmith.errors import EngineError
from tunesmith.et_agent.flywheel.hints import list_hints
from tunesmith.et_agent.flywheel.journal import AttemptPlan, Record
from tunesmith.et_agent.flywheel.judging import judge_by_function, judge_by_votes
from tunesmith.et_agent.flywheel.operators import OPERATORS, FlywheelAttempt, Parent
from tunesmith.et_agent.flywheel.prompted_roles import build_model_analyst, build_model_author
from tunesmith.et_agent.flywheel.roles import Role
from tunesmith.et_agent.flywheel.state import QuestionState, is_correct
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.failures import shorten
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import BoundModel, ModelProvider
from tunesmith.runs.load_function import load_function
from tunesmith.runs.policy import check_auxiliary
from tunesmith.types import JudgeType, Turn

MAX_REASON_CHARS = 500
AUXILIARY = "auxiliary_models."


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Everything that attempts share; none of it changes."""

    config: FlywheelConfig
    environment: Environment
    providers: Mapping[str, ModelProvider]
    """`model` and the auxiliary models."""
    functions: Mapping[str, Role]
    """Roles that are functions, by role."""
    judge: JudgeType

    async def make(self, plan: AttemptPlan, state: QuestionState, *, order: int) -> Record:
        """One attempt. An error in it is recorded as a failure; it never counts as a wrong answer."""
        models = self._open_models(plan, order)
        turns: list[Turn] = []
        try:
            async with asyncio.timeout(self.config.rollout.timeout_s):
                record = await self._run(plan, state, models)
        except Exception as error:  # noqa: BLE001 - tools, roles and judges are user code
            record = Record(plan=plan, outcome="failed", reason=describe(error))
        finally:
            for name, bound in models.items():
                turns += self.providers[self.sources[name]].close(bound)
        errors = [each.session.engine_error for each in models.values() if each.session is not None]
        failed = next((each for each in errors if each is not None), None)
        if failed is not None:
            record = Record(plan=plan, outcome="failed", reason=describe(EngineError(failed)))
        return replace(record, tokens=sum(len(turn.sampled_ids) for turn in turns))

    async def _run(self, plan: AttemptPlan, state: QuestionState, models: Mapping[str, BoundModel]) -> Record:
        parent = None if plan.parent is None else state.kept[plan.parent]
        given = None
        if parent is not None:
            assert parent.transcript is not None
            given = Parent(transcript=parent.transcript, is_correct=is_correct(parent, self.config))
        attempt = FlywheelAttempt(
            row=state.row,
            environment=self.environment,
            config=self.config,
            parent=given,
            policy=models["policy"].model,
            analyst=self._find_role("analyst", models, build_model_analyst),
            author=self._find_role("author", models, build_model_author),
            hints=list_hints(self.environment.tools, self.config.hints),
            rng=random.Random(derive_seed(self.config.seed, "hint", plan.question_id, plan.number)),
        )
        proposal = await OPERATORS[plan.operator](attempt)
        if proposal.transcript is None:
            return Record(plan=plan, outcome="nothing", step=proposal.step, reason=proposal.reason)
        correctness = await self._judge(state.row, proposal.transcript, models)
        return Record(
            plan=plan,
            outcome="unscored" if correctness is None else "kept",
            step=proposal.step,
            reason=proposal.reason,
            correctness=correctness,
            transcript=proposal.transcript,
        )

    async def _judge(
        self, row: Mapping[str, Any], transcript: Transcript, models: Mapping[str, BoundModel]
    ) -> float | None:
        if self.config.roles.judge is not None:
            return await judge_by_votes(models["judge"].model, row, transcript, self.config.num_votes)
        auxiliary = {name: models[AUXILIARY + name].model for name in self.config.auxiliary_models}
        return await judge_by_function(self.judge, row, transcript, auxiliary)

    def _find_role(self, name: str, models: Mapping[str, BoundModel], build: Callable[[Any], Role]) -> Role:
        return self.functions[name] if name in self.functions else build(models[name].model)

    @property
    def sources(self) -> dict[str, str]:
        """The provider of each role that is a model, and each auxiliary model under its own name, for the judge."""
        roles = {name: value for name, value in self.config.roles.model_dump().items() if value in self.providers}
        return {**{AUXILIARY + name: name for name in self.config.auxiliary_models}, **roles}

    def _open_models(self, plan: AttemptPlan, order: int) -> dict[str, BoundModel]:
        seed = self.config.seed
        return {
            name: self.providers[source].open(
                seed=derive_seed(seed, plan.question_id, plan.number, name), order=(order, place)
            )
            for place, (name, source) in enumerate(self.sources.items())
        }


def describe(error: BaseException) -> str:
    return shorten(f"{type(error).__name__}: {error}", MAX_REASON_CHARS)


def check_roles(config: FlywheelConfig) -> None:
    """Raise if a function of a role cannot be loaded, or an auxiliary model is invalid."""
    load_role_functions(config)
    for name, section in config.auxiliary_models.items():
        check_auxiliary(name, section)


def load_role_functions(config: FlywheelConfig) -> dict[str, Role]:
    return {
        name: load_function(value, knob=f"roles.{name}")
        for name, value in config.roles.model_dump().items()
        if value is not None and ":" in value
    }


def load_crew(config: FlywheelConfig, actors: Actors, environment: Environment) -> Crew:
    """The roles of a config; `actors` has the loaded models and the judge."""
    assert actors.agent.judge is not None
    return Crew(
        config=config,
        environment=environment,
        providers={OWN_MODEL: actors.service, **actors.auxiliary_models},
        functions=load_role_functions(config),
        judge=actors.agent.judge,
    )
