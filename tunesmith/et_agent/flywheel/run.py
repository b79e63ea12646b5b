"""The flywheel as a stage: questions in, judged trajectories with their provenance out.

Iteration 0 rolls out each question; every further one applies the operators to the trajectories of the iterations
before it. Attempts run in batches. Each batch is appended to `attempts.jsonl`, so that a killed stage resumes after the
last complete batch and, on a CPU, makes the same trajectories. At the end `trajectories.jsonl` has every trajectory,
right and wrong, as `rft_filter` reads them, and `report.json` the counts by operator.

An attempt is a rollout whose workflow is `AttemptBatch.make`. A model in a role has a session of its own in each
attempt, with a seed of its own; requests carry their sampling parameters, so nothing is shared between attempts.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.stage import TABLES, ChooseModel, StageResult, check_models, check_run, describe_device
from tunesmith.config import FlywheelConfig
from tunesmith.config.et_agent import OWN_MODEL
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.environments.environment import Environment
from tunesmith.environments.tool_agent import tool_agent
from tunesmith.environments.transcript import Transcript
from tunesmith.errors import DataError, EngineError, shorten
from tunesmith.et_agent.flywheel.operators import OPERATORS, FlywheelAttempt, Proposal, list_hints
from tunesmith.et_agent.flywheel.roles import Role, TruncatedReplyError, build_model_analyst, build_model_author
from tunesmith.et_agent.flywheel.state import (
    OUTCOMES,
    AttemptPlan,
    Attempts,
    Outcome,
    QuestionState,
    Record,
    find_fresh_records,
    is_correct,
    plan_iteration,
)
from tunesmith.judges.llm import ask
from tunesmith.judges.redundancy import parse_vote
from tunesmith.judges.squad import list_accepted
from tunesmith.judges.tir import build_prompt
from tunesmith.monitor.console import ConsoleProgress, format_duration
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import build_evaluator
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import BoundModel, ModelProvider
from tunesmith.rollout.signature import list_parameters
from tunesmith.runs.load_function import load_environment, load_function
from tunesmith.runs.policy import build_sampling, check_auxiliary, load_actors
from tunesmith.runs.tasks import check_row_tools
from tunesmith.runs.workspace import Workspace, compute_digest
from tunesmith.storage import save_json
from tunesmith.tasks.load import check_finite, load_tasks, write_rows
from tunesmith.types import JudgeOutput, JudgeType, Sampling, Task, Turn, WorkflowOutput

logger = logging.getLogger(__name__)
TRAJECTORIES_FILE, REPORT_FILE = "trajectories.jsonl", "report.json"
KEYS_WITHOUT_EFFECT = {"has_progress"}


def run_stage(config: FlywheelConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Run or resume a flywheel in `out_dir`.

    Raises:
        ConfigError: the folder has attempts of other settings or questions.
        DataError: a row has no question, a tool that the environment has not, or a number that is not finite.
        RolloutError: more than `rollout.max_failure_rate` of a batch failed; the batch is not saved.
    """
    states = load_questions(config)
    check_models(config.model, [config.model.path])
    functions = load_role_functions(config)
    for name, section in config.auxiliary_models.items():
        check_auxiliary(f"auxiliary_models.{name}", section)
    with Workspace(out_dir) as workspace:
        attempts = Attempts(workspace, describe_inputs(config, states))
        run_config = config.to_run_config()
        judge = load_function(config.judge, knob="judge")
        environment = load_environment(config.environment)
        workflow = partial(tool_agent, environment=environment)
        build_model = choose_model(run_config)
        policy, actors = load_actors(run_config, workflow=workflow, judge=judge, build_model=build_model)
        begin_batch = partial(
            AttemptBatch,
            config=config,
            environment=environment,
            providers={OWN_MODEL: actors.model, **actors.auxiliary_models},
            functions=functions,
            judge=judge,
            states=states,
        )
        records: list[Record] = []
        progress = FlywheelProgress(config)

        async def run() -> None:
            for iteration in range(config.num_iterations + 1):
                plans = [plan for state in states.values() for plan in plan_iteration(state, iteration, config)]
                for start in range(0, len(plans), config.batch_size):
                    batch = plans[start : start + config.batch_size]
                    made = attempts.take(batch)
                    if made is None:
                        made = await begin_batch(plans=batch).sample(actors)
                        attempts.add(made)
                        progress.show(iteration, start + len(batch), len(plans), num_made=len(batch))
                    records.extend(find_fresh_records(made, states))

        with closing(policy):
            run_lockstep(run(), config.rollout)
        operators = count_outcomes(records, config)
        num_trajectories = write_rows(out_dir / TRAJECTORIES_FILE, iter_rows(states))
        save_json(out_dir / REPORT_FILE, operators)
    columns = next(iter(operators.values()), {})
    rows = [[name, *map(str, row.values())] for name, row in operators.items()]
    figures: dict[str, Any] = {
        "questions": len(states),
        "trajectories": num_trajectories,
        "right trajectories": sum(counts["right"] for counts in operators.values()),
        TABLES: format_table(["operator", *columns], rows),
    }
    tokens, device = sum(each.tokens for each in records), describe_device(config.model.device, config.num_cpu_threads)
    return StageResult(tokens=tokens, device=device, figures=figures)


def load_questions(config: FlywheelConfig) -> dict[str, QuestionState]:
    tasks = load_tasks(config.train_dataset, name="train")
    for task in tasks:
        if not task.row.get("question"):
            raise DataError(f"row {task.index} of {config.train_dataset.path!r} has no 'question'")
    check_row_tools(tasks, config.environment, path=config.train_dataset.path)
    check_finite((task.row for task in tasks), path=config.train_dataset.path)
    return {task.task_id: QuestionState(question_id=task.task_id, row=task.row) for task in tasks}


def describe_inputs(config: FlywheelConfig, states: Mapping[str, QuestionState]) -> dict[str, Any]:
    settings = config.model_dump(mode="json", exclude=KEYS_WITHOUT_EFFECT)
    questions = [[name, dict(state.row)] for name, state in states.items()]
    return {
        "digest": compute_digest(settings),
        "questions": compute_digest(questions),
        "seed": config.seed,
        "settings": settings,
    }


def iter_rows(states: Mapping[str, QuestionState]) -> Iterator[dict[str, Any]]:
    """A row for each trajectory: the question's own fields, the provenance, correctness and the transcript."""
    for state in states.values():
        for record in state.kept.values():
            assert record.transcript is not None
            yield {
                **state.row,
                "question_id": state.question_id,
                "trajectory_id": record.plan.trajectory_id,
                "parent_id": record.plan.parent_id,
                "operator": record.plan.operator,
                "iteration": record.plan.iteration,
                "step": record.step,
                "reason": record.reason,
                "correctness": record.correctness,
                "transcript": record.transcript.to_json(),
            }


def count_outcomes(records: Sequence[Record], config: FlywheelConfig) -> dict[str, dict[str, int]]:
    """Attempts, outcomes and right trajectories of each operator; first rollouts are on a line of their own."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        name = "first rollout" if record.plan.iteration == 0 else record.plan.operator
        tally = counts.setdefault(name, Counter())
        tally["attempts"] += 1
        tally[record.outcome] += 1
        tally["right"] += record.outcome == "kept" and is_correct(record, config)
    return {
        name: {key: tally[key] for key in ("attempts", *OUTCOMES, "right")} for name, tally in sorted(counts.items())
    }


class FlywheelProgress:
    """A line for each batch, with estimates of the time that is left."""

    def __init__(self, config: FlywheelConfig) -> None:
        self._config = config
        self._console = ConsoleProgress()
        self._num_made = 0
        self._started = time.monotonic()

    def show(self, iteration: int, done: int, total: int, *, num_made: int) -> None:
        """`done` of the `total` attempts of an iteration, of which the last `num_made` were made by this process."""
        self._num_made += num_made
        if not self._config.has_progress:
            return
        s_per_attempt = (time.monotonic() - self._started) / self._num_made
        left = total - done
        # how many attempts a later iteration makes is unknown before it: it is taken to be as long as this one
        later = (self._config.num_iterations - iteration) * total
        self._console.show_line(
            f"flywheel iteration {iteration}/{self._config.num_iterations}  {done}/{total} attempts  "
            f"eta of the iteration {format_duration(s_per_attempt * left)}, of all about "
            f"{format_duration(s_per_attempt * (left + later))}"
        )


def check_stage(config: FlywheelConfig) -> None:
    run, roles = config.to_run_config(), set(config.roles.model_dump().values())
    # a model that has a role is used, whether the judge takes auxiliary models or not
    others = {name: each for name, each in run.auxiliary_models.items() if name not in roles}
    check_run(run.model_copy(update={"auxiliary_models": others}), models=[config.model.path])
    load_role_functions(config)


MAX_REASON_CHARS = 500
AUXILIARY = "auxiliary_models."


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """What the workflow of an attempt receives as its model."""

    plan: AttemptPlan
    models: Mapping[str, BoundModel]
    """By role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBatch:
    """Attempts that are made together: the provider of their models, and their workflow."""

    config: FlywheelConfig
    environment: Environment
    providers: Mapping[str, ModelProvider]
    """`model` and the auxiliary models."""
    functions: Mapping[str, Role]
    """Roles that are functions, by role."""
    judge: JudgeType
    states: Mapping[str, QuestionState]
    plans: Sequence[AttemptPlan]
    made: dict[AttemptPlan, Record] = field(default_factory=dict)
    """Attempts that ended without an error."""

    async def sample(self, actors: Actors) -> list[Record]:
        """Make the attempts. An error in one is recorded as a failure; it never counts as a wrong answer."""
        tasks = [
            Task(task_id=plan.trajectory_id, index=index, row=self.states[plan.question_id].row)
            for index, plan in enumerate(self.plans)
        ]
        requests = build_requests(tasks, size=1, seed=self.config.seed)  # only their places follow from this seed
        agent = replace(actors.agent, workflow=self.make, judge=None)
        async with build_evaluator(replace(actors, agent=agent, model=self, auxiliary_models={})) as dispatcher:
            groups = await dispatcher.evaluate(requests, max_failure_rate=self.config.rollout.max_failure_rate)
        records = []
        for plan, group in zip(self.plans, groups, strict=True):
            (run,) = group.trajectories
            if run.failure is None:
                record = self.made[plan]
            else:
                record = Record(plan=plan, outcome="failed", reason=shorten(run.failure.message, MAX_REASON_CHARS))
            records.append(replace(record, tokens=run.num_sampled_tokens))
        return records

    @property
    def sources(self) -> dict[str, str]:
        """The provider of each role that is a model, and each auxiliary model under its own name, for the judge."""
        roles = {name: value for name, value in self.config.roles.model_dump().items() if value in self.providers}
        return {**{AUXILIARY + name: name for name in self.config.auxiliary_models}, **roles}

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        """The models of the attempt at `order[0]`. Their seeds follow from the question and the attempt's number, not
        from its place in the batch."""
        plan, limit = self.plans[order[0]], self.config.role_max_tokens
        longer = None if limit is None else replace(build_sampling(self.config.model), max_tokens=limit)
        models = {
            name: self.providers[source].open(
                seed=derive_seed(self.config.seed, plan.question_id, plan.number, name),
                order=(order[0], place),
                sampling=longer if source == OWN_MODEL and name != "policy" else None,
            )
            for place, (name, source) in enumerate(self.sources.items())
        }

        def close() -> tuple[Turn, ...]:
            return tuple(turn for each in models.values() for turn in each.close())

        return BoundModel(model=OpenAttempt(plan=plan, models=models), session=None, close=close)

    async def make(self, task: Mapping[str, Any], model: OpenAttempt) -> WorkflowOutput:
        """The workflow. Its reward says that the attempt ended; the correctness is in the record."""
        try:
            record = await self._make_record(model.plan, model.models)
        finally:  # an engine error is one also where a role has caught it
            errors = [each.session.engine_error for each in model.models.values() if each.session is not None]
            if (failed := next(filter(None, errors), None)) is not None:
                raise EngineError(failed)
        self.made[model.plan] = record
        return WorkflowOutput(reward=1.0)

    async def _make_record(self, plan: AttemptPlan, models: Mapping[str, BoundModel]) -> Record:
        state = self.states[plan.question_id]
        parent = None if plan.parent is None else state.kept[plan.parent]
        environment = self.environment.for_task(state.row)
        attempt = FlywheelAttempt(
            row=state.row,
            environment=environment,
            config=self.config,
            parent=None if parent is None else parent.transcript,
            is_correct=parent is not None and is_correct(parent, self.config),
            policy=models["policy"].model,
            analyst=self._find_role("analyst", models, build_model_analyst),
            author=self._find_role("author", models, build_model_author),
            hints=list_hints(environment.tools, self.config.hints),
            rng=random.Random(derive_seed(self.config.seed, "hint", plan.question_id, plan.number)),
        )
        try:
            proposal = await OPERATORS[plan.operator](attempt)
        except TruncatedReplyError as error:
            proposal = Proposal(reason=str(error))
        outcome: Outcome = "nothing"
        correctness = None
        if proposal.transcript is not None:
            correctness = await self._judge(state.row, proposal.transcript, models)
            outcome = "unscored" if correctness is None else "kept"
        return Record(
            plan=plan,
            outcome=outcome,
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


def load_role_functions(config: FlywheelConfig) -> dict[str, Role]:
    return {
        name: load_function(value, knob=f"roles.{name}")
        for name, value in config.roles.model_dump().items()
        if value is not None and ":" in value
    }


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
    prompt = build_prompt(transcript.question, list_accepted(row), transcript.answer)
    return count_votes([parse_vote(await ask(model, prompt) or "") for _ in range(num_votes)])


def count_votes(votes: Sequence[bool | None]) -> float | None:
    num_yes, num_no = sum(vote is True for vote in votes), sum(vote is False for vote in votes)
    return None if num_yes == num_no else float(num_yes > num_no)
