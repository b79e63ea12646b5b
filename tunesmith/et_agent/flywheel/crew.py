"""The roles of a flywheel, loaded once: models with their engines, functions, the judge, and the environment.

An attempt is a rollout whose workflow is `AttemptBatch.make`. A model in a role has a session of its own in each
attempt, with a seed of its own; requests carry their sampling parameters, so nothing is shared between attempts.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunesmith.config import FlywheelConfig
from tunesmith.config.et_agent import OWN_MODEL
from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import Transcript
from tunesmith.errors import EngineError
from tunesmith.et_agent.flywheel.journal import AttemptPlan, Record
from tunesmith.et_agent.flywheel.operators import OPERATORS, FlywheelAttempt, Parent, list_hints
from tunesmith.et_agent.flywheel.prompted_roles import build_model_analyst, build_model_author
from tunesmith.et_agent.flywheel.roles import Role
from tunesmith.et_agent.flywheel.state import QuestionState, is_correct
from tunesmith.judges.llm import quote
from tunesmith.judges.redundancy import ask_for_vote
from tunesmith.judges.squad import list_accepted
from tunesmith.judges.tir import PROMPT
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.failures import shorten
from tunesmith.rollout.group import GroupRequest, build_requests
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import BoundModel, ModelProvider
from tunesmith.rollout.signature import list_parameters
from tunesmith.runs.load_function import load_function
from tunesmith.runs.policy import check_auxiliary
from tunesmith.types import Group, JudgeOutput, JudgeType, Sampling, Task, Turn, WorkflowOutput

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

    async def run(self, plan: AttemptPlan, state: QuestionState, models: Mapping[str, BoundModel]) -> Record:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """What the workflow of an attempt receives as its model."""

    plan: AttemptPlan
    models: Mapping[str, BoundModel]
    """By role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBatch:
    """Attempts that are made together: the provider of their models, and their workflow."""

    crew: Crew
    plans: Sequence[AttemptPlan]
    states: Mapping[str, QuestionState]
    made: dict[AttemptPlan, Record] = field(default_factory=dict)
    """Attempts that ended without an error."""

    def list_requests(self) -> list[GroupRequest]:
        """A group of one rollout for each attempt; only its place follows from the request's seed."""
        return build_requests(
            [
                Task(task_id=plan.trajectory_id, index=index, row=self.states[plan.question_id].row)
                for index, plan in enumerate(self.plans)
            ],
            size=1,
            seed=self.crew.config.seed,
        )

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        """The models of the attempt at `order[0]`. Their seeds follow from the question and the attempt's number, not
        from its place in the batch."""
        plan, crew = self.plans[order[0]], self.crew
        models = {
            name: crew.providers[source].open(
                seed=derive_seed(crew.config.seed, plan.question_id, plan.number, name), order=(order[0], place)
            )
            for place, (name, source) in enumerate(crew.sources.items())
        }
        return BoundModel(model=OpenAttempt(plan=plan, models=models), session=None)

    def close(self, bound: BoundModel) -> tuple[Turn, ...]:
        models: Mapping[str, BoundModel] = bound.model.models
        sources = self.crew.sources
        return tuple(turn for name, each in models.items() for turn in self.crew.providers[sources[name]].close(each))

    async def make(self, task: Mapping[str, Any], model: OpenAttempt) -> WorkflowOutput:
        """The workflow. Its reward says that the attempt ended; the correctness is in the record."""
        try:
            record = await self.crew.run(model.plan, self.states[model.plan.question_id], model.models)
        finally:  # an engine error is one also where a role has caught it
            errors = [each.session.engine_error for each in model.models.values() if each.session is not None]
            if (failed := next(filter(None, errors), None)) is not None:
                raise EngineError(failed)
        self.made[model.plan] = record
        return WorkflowOutput(reward=1.0)

    def list_records(self, groups: Sequence[Group]) -> list[Record]:
        """The attempts, in order. An error in one is recorded as a failure; it never counts as a wrong answer."""
        records = []
        for plan, group in zip(self.plans, groups, strict=True):
            (run,) = group.trajectories
            if run.failure is None:
                record = self.made[plan]
            else:
                record = Record(plan=plan, outcome="failed", reason=shorten(run.failure.message, MAX_REASON_CHARS))
            records.append(replace(record, tokens=sum(len(turn.sampled_ids) for turn in run.turns)))
        return records


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
        providers={OWN_MODEL: actors.model, **actors.auxiliary_models},
        functions=load_role_functions(config),
        judge=actors.agent.judge,
    )


logger = logging.getLogger(__name__)


async def judge_by_function(
    judge: JudgeType, row: Mapping[str, Any], transcript: Transcript, auxiliary_models: Mapping[str, Any]
) -> float | None:
    """The reward of a judge, which receives what it receives in training, and a copy of the row of its own."""
    available = {"response": transcript, "auxiliary_models": dict(auxiliary_models), "logger": logger}
    arguments = {name: available[name] for name in list_parameters(judge) & available.keys()}
    verdict = await judge(task=copy.deepcopy(dict(row)), **arguments)  # type: ignore[arg-type]
    if not isinstance(verdict, JudgeOutput):
        raise TypeError(f"the judge must return a JudgeOutput, got {type(verdict).__name__}")
    if verdict.reward is not None and not math.isfinite(verdict.reward):
        raise ValueError(f"the judge returned reward {verdict.reward}; it must be a finite number")
    return verdict.reward


async def judge_by_votes(model: Any, row: Mapping[str, Any], transcript: Transcript, num_votes: int) -> float | None:
    """1.0 or 0.0 by the majority of exactly `num_votes` votes; None for a tie; 0.0 without an answer.

    Every answer gets the same number of votes whatever the first ones say, so the verdict is not biased to yes or to
    no. A tie is no verdict: the trajectory is left out, not scored 0.
    """
    if not transcript.answer:
        return 0.0
    prompt = PROMPT.format(
        question=quote(transcript.question),
        reference=quote("\n".join(list_accepted(row))),
        answer=quote(transcript.answer),
    )
    return count_votes([await ask_for_vote(model, prompt) for _ in range(num_votes)])


def count_votes(votes: Sequence[bool | None]) -> float | None:
    """The side with more votes; None for a tie."""
    num_yes, num_no = sum(vote is True for vote in votes), sum(vote is False for vote in votes)
    return None if num_yes == num_no else float(num_yes > num_no)
