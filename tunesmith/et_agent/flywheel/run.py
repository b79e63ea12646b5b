"""The flywheel as a stage: questions in, judged trajectories with their provenance out.

Iteration 0 rolls out each question; every further one applies the operators to the trajectories of the iterations
before it. Attempts run in batches. Each batch is appended to `attempts.jsonl`, so that a killed stage resumes after the
last complete batch and, on a CPU, makes the same trajectories. At the end `trajectories.jsonl` has every trajectory,
right and wrong, as `rft_filter` reads them, and `report.json` the counts by operator.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.stage import TABLES, ChooseModel, StageResult, check_run, describe_device
from tunesmith.config import FlywheelConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.environments.tool_agent import tool_agent
from tunesmith.errors import DataError
from tunesmith.et_agent.flywheel.crew import AttemptBatch, Crew, check_roles, load_crew, load_role_functions
from tunesmith.et_agent.flywheel.journal import OUTCOMES, AttemptPlan, Attempts, Record
from tunesmith.et_agent.flywheel.state import QuestionState, find_fresh_records, is_correct, plan_iteration
from tunesmith.et_agent.selection.rows import write_rows
from tunesmith.monitor.console import format_duration
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import build_evaluator
from tunesmith.runs.load_function import load_environment, load_function
from tunesmith.runs.policy import BuildModel, check_policy, load_actors
from tunesmith.runs.workspace import Workspace, compute_digest
from tunesmith.storage import save_json
from tunesmith.tasks.load import load_tasks

TRAJECTORIES_FILE, REPORT_FILE = "trajectories.jsonl", "report.json"
KEYS_WITHOUT_EFFECT = {"has_progress"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlywheelResult:
    """Counts of a flywheel."""

    path: Path
    """The trajectories."""
    num_questions: int
    num_trajectories: int
    num_correct: int
    num_tokens: int
    """Tokens that the stage's model sampled."""
    operators: Mapping[str, Mapping[str, int]]
    """Operator -> name of a count -> count."""


def run_flywheel(config: FlywheelConfig, *, out_dir: Path, build_model: BuildModel) -> FlywheelResult:
    """Run or resume a flywheel in `out_dir`.

    Raises:
        ConfigError: the folder has attempts of other settings or questions.
        DataError: a row has no question.
        RolloutError: more than `rollout.max_failure_rate` of a batch failed; the batch is not saved.
    """
    states = load_questions(config)
    check_policy(config.model)
    check_roles(config)
    with Workspace(out_dir) as workspace:
        attempts = Attempts(workspace, describe_inputs(config, states))
        return make_attempts(config, states, attempts, out_dir=out_dir, build_model=build_model)


def make_attempts(
    config: FlywheelConfig,
    states: Mapping[str, QuestionState],
    attempts: Attempts,
    *,
    out_dir: Path,
    build_model: BuildModel,
) -> FlywheelResult:
    """Make the attempts that are not saved yet, and write the result of all."""
    run_config = config.to_run_config()
    judge = load_function(config.judge, knob="judge")
    environment = load_environment(config.environment)
    workflow = partial(tool_agent, environment=environment)
    policy, actors = load_actors(run_config, workflow=workflow, judge=judge, build_model=build_model)
    crew = load_crew(config, actors, environment)
    records: list[Record] = []
    progress = FlywheelProgress(config)

    async def run() -> None:
        for iteration in range(config.num_iterations + 1):
            plans = [plan for state in states.values() for plan in plan_iteration(state, iteration, config)]
            progress.begin(iteration, len(plans))
            for start in range(0, len(plans), config.batch_size):
                batch = plans[start : start + config.batch_size]
                made = attempts.take(batch)
                if made is None:
                    made = await sample_batch(batch, states, crew, actors)
                    attempts.add(made)
                    progress.count(len(batch))
                else:
                    progress.skip(len(batch))
                records.extend(find_fresh_records(made, states))

    run_lockstep(run(), config.rollout)
    policy.close()
    return write_result(out_dir, states, records, config)


async def sample_batch(
    plans: Sequence[AttemptPlan], states: Mapping[str, QuestionState], crew: Crew, actors: Actors
) -> list[Record]:
    """Make the attempts of a batch; returns them in order."""
    batch = AttemptBatch(crew=crew, plans=plans, states=states)
    agent = replace(actors.agent, workflow=batch.make, judge=None)
    async with build_evaluator(replace(actors, agent=agent, model=batch, auxiliary_models={})) as dispatcher:
        groups = await dispatcher.evaluate(batch.list_requests(), max_failure_rate=crew.config.rollout.max_failure_rate)
    return batch.list_records(groups)


def load_questions(config: FlywheelConfig) -> dict[str, QuestionState]:
    """The questions by their id, in the order of the data set."""
    tasks = load_tasks(config.train_dataset, name="train")
    for task in tasks:
        if not task.row.get("question"):
            raise DataError(f"row {task.index} of {config.train_dataset.path!r} has no 'question'")
    return {task.task_id: QuestionState(question_id=task.task_id, row=task.row) for task in tasks}


def describe_inputs(config: FlywheelConfig, states: Mapping[str, QuestionState]) -> dict[str, Any]:
    """What the attempts depend on."""
    settings = config.model_dump(mode="json", exclude=KEYS_WITHOUT_EFFECT)
    questions = [[name, dict(state.row)] for name, state in states.items()]
    return {
        "digest": compute_digest(settings),
        "questions": compute_digest(questions),
        "seed": config.seed,
        "settings": settings,
    }


def write_result(
    out_dir: Path, states: Mapping[str, QuestionState], records: Sequence[Record], config: FlywheelConfig
) -> FlywheelResult:
    operators = count_outcomes(records, config)
    path = out_dir / TRAJECTORIES_FILE
    num_trajectories = write_rows(path, iter_rows(states))
    save_json(out_dir / REPORT_FILE, operators)
    return FlywheelResult(
        path=path,
        num_questions=len(states),
        num_trajectories=num_trajectories,
        num_correct=sum(counts["right"] for counts in operators.values()),
        num_tokens=sum(each.tokens for each in records),
        operators=operators,
    )


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
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._iteration = self._total = self._done = self._num_made = 0
        self._started = time.monotonic()

    def begin(self, iteration: int, total: int) -> None:
        self._iteration, self._total, self._done = iteration, total, 0

    def skip(self, count: int) -> None:
        """Attempts of an earlier run, which took no time in this one."""
        self._done += count

    def count(self, count: int) -> None:
        self._done += count
        self._num_made += count
        if not self._config.has_progress:
            return
        s_per_attempt = (time.monotonic() - self._started) / self._num_made
        left = self._total - self._done
        # how many attempts a later iteration makes is unknown before it: it is taken to be as long as this one
        later = (self._config.num_iterations - self._iteration) * self._total
        self._console.print(
            f"flywheel iteration {self._iteration}/{self._config.num_iterations}  {self._done}/{self._total} attempts  "
            f"eta of the iteration {format_duration(s_per_attempt * left)}, of all about "
            f"{format_duration(s_per_attempt * (left + later))}",
            markup=False,
        )


def check_stage(config: FlywheelConfig) -> None:
    check_run(config.to_run_config(), models=[config.model.path])
    load_role_functions(config)


def run_stage(config: FlywheelConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    result = run_flywheel(config, out_dir=out_dir, build_model=choose_model(config.to_run_config()))
    columns = next(iter(result.operators.values()), {})
    rows = [[name, *map(str, row.values())] for name, row in result.operators.items()]
    figures: dict[str, Any] = {
        "questions": result.num_questions,
        "trajectories": result.num_trajectories,
        "right trajectories": result.num_correct,
        TABLES: format_table(["operator", *columns], rows),
    }
    return StageResult(
        tokens=result.num_tokens,
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures=figures,
    )
