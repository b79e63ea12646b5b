"""Run a workflow on its tasks and keep the conversations that the judge accepts, as rows for `tunesmith sft`.

The model that the workflow calls is the run's own, so that fine-tuning on the rows is rejection sampling, or a teacher,
so that it is distillation. Messages, tool calls, results and tools are those of the requests and replies. A row is one
conversation: each request that extends an earlier one continues its row, and each reply is trained in one row only.
Other messages of the assistant are context (`weight: 0`).

Batches of tasks are appended to `<out>.part`, so that a killed command resumes after its last complete batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.chat.conversation import compute_match_keys
from tunesmith.chat.messages import MatchKey, parse_messages
from tunesmith.commands.collect.forward import RecordedCall, RecordingModel
from tunesmith.commands.pass_rate import SETTINGS, describe_inputs, load_unmeasured_tasks, run_batches
from tunesmith.commands.sft.conversations import exclude_replies
from tunesmith.commands.stage import ChooseModel, StageResult, describe_device
from tunesmith.config import CollectConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import DataError
from tunesmith.model.load import check_section
from tunesmith.model.source.fingerprint import describe_weights
from tunesmith.model.torch_modes import set_num_threads
from tunesmith.rollout.actors import Actors
from tunesmith.runs.load_function import load_functions
from tunesmith.runs.policy import (
    BuildModel,
    Policy,
    build_actors,
    check_auxiliary,
    load_actors,
    load_auxiliary,
)
from tunesmith.runs.result import Result
from tunesmith.runs.workspace import open_part
from tunesmith.storage import load_json_lines
from tunesmith.tasks.load import write_rows
from tunesmith.types import Group, JudgeType, Trajectory, WorkflowType, is_at_least

ROWS_FILE = "conversations.jsonl"
"""Output of a stage."""
OWN_SETTINGS = (*SETTINGS, "teacher", "num_runs", "min_reward", "max_rollouts_per_task", "max_tasks")
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Collected(Result):
    """Result of `tunesmith collect`."""

    path: Path
    num_rows: int
    num_tasks: int
    num_tasks_with_rows: int
    num_rollouts: int
    dropped: Mapping[str, int]
    """Reason -> rollouts that were not kept for it."""

    def list_facts(self) -> dict[str, str]:
        dropped = ", ".join(f"{number} {reason}" for reason, number in self.dropped.items())
        facts = {
            "path": str(self.path),
            "rows": f"{self.num_rows} of {self.num_tasks_with_rows} of {self.num_tasks} tasks",
            "dropped": f"{dropped or 'none'} of {self.num_rollouts} rollouts",
        }
        if self.num_rows:
            return facts | {"next": f"tunesmith sft sft.yaml --set train_dataset.path={self.path}"}
        return facts | {"note": "no rollout was kept: lower min_reward, raise num_runs, or let a teacher answer"}


def collect(
    config: CollectConfig, *, workflow: WorkflowType, judge: JudgeType | None, build_model: BuildModel, out: Path
) -> Collected:
    """Write the rows to `out`."""
    rows = load_unmeasured_tasks(config, fields=[])
    tasks = rows[: config.max_tasks]
    if config.teacher is None:
        check_section(config.model)
    else:
        check_auxiliary("teacher", config.teacher)
    settings = config.model_dump(mode="json", include=set(OWN_SETTINGS))
    for key in ("base_url", "api_key_env") if config.teacher is not None else ():
        del settings["teacher"][key]  # a server may have moved
    weights = describe_weights(config.model.path) if config.teacher is None else None
    with open_part(out, describe_inputs(config, rows, settings=settings, weights=weights)) as journal:
        num_done = sum(len(batch["rows"]) for batch in journal.rows)
        model, actors, policy = load_models(config, workflow=workflow, judge=judge, build_model=build_model)

        def record(start: int, groups: Sequence[Group]) -> None:
            dropped: Counter[str] = Counter()
            kept = [keep_rollouts(index, group, model, config, dropped) for index, group in enumerate(groups)]
            journal.append({"rows": kept, "dropped": dropped})

        async def run() -> None:
            async with model.serve(config.rollout.http_port):
                await run_batches(config, actors, tasks, config.num_runs, num_done, record)

        with nullcontext() if policy is None else closing(policy):
            run_lockstep(run(), config.rollout)
        batches = load_json_lines(journal.path)
        by_task = [kept for batch in batches for kept in batch["rows"]]
        num_rows = write_rows(out, (row for kept in by_task for row in kept))
    return Collected(
        path=out,
        num_rows=num_rows,
        num_tasks=len(by_task),
        num_tasks_with_rows=sum(map(bool, by_task)),
        num_rollouts=config.num_runs * len(by_task),
        dropped=sum((Counter(batch["dropped"]) for batch in batches), Counter()),
    )


def load_models(
    config: CollectConfig, *, workflow: WorkflowType, judge: JudgeType | None, build_model: BuildModel
) -> tuple[RecordingModel, Actors, Policy | None]:
    """The model that workflows call, what runs them, and the run's own model unless a teacher takes its place."""
    functions: dict[str, Any] = {"workflow": workflow, "judge": judge, "build_model": build_model}
    policy = None
    if config.teacher is None:
        policy, actors = load_actors(config, **functions, has_trainer=False)
    else:
        set_num_threads(config.num_cpu_threads)
        options: dict[str, Any] = {"device": config.model.device, "build_model": build_model}
        teacher = load_auxiliary("teacher", config.teacher, config.engine, **options)
        actors = build_actors(config, teacher, **functions)
    model = RecordingModel(actors.model, build_model=build_model)
    return model, replace(actors, model=model, service=None), policy  # the recording model has a server of its own


def keep_rollouts(
    index: int, group: Group, model: RecordingModel, config: CollectConfig, dropped: Counter[str]
) -> list[dict[str, Any]]:
    """The rows of a task: those of its best accepted rollouts; counts the others by reason."""
    accepted: list[tuple[Trajectory, list[RecordedCall]]] = []
    seen: set[str] = set()
    for run in group.trajectories:
        calls = model.take((index, run.run_index))
        content = json.dumps([[call.messages, call.reply] for call in calls])
        if run.failure is not None or run.reward is None:
            dropped["failed"] += 1
        elif not is_at_least(run.reward, config.min_reward):
            dropped["below min_reward"] += 1
        elif not calls:
            dropped["without a model call"] += 1
        elif any(call.is_cut for call in calls):
            dropped["cut off at a limit of tokens"] += 1
        elif content in seen:
            dropped["repeated"] += 1
        else:
            seen.add(content)
            accepted.append((run, calls))
    accepted.sort(key=lambda each: -float(each[0].reward or 0))  # stable: earlier rollouts first
    dropped["beyond max_rollouts_per_task"] += len(accepted[config.max_rollouts_per_task :])
    rows = []
    for run, calls in accepted[: config.max_rollouts_per_task]:
        for messages, tools in build_conversations(calls):
            row = {"messages": messages, "task_id": run.task.task_id, "reward": run.reward}
            rows.append(row | ({"tools": tools} if tools else {}))
    return rows


@dataclass(slots=True, kw_only=True)
class _Conversation:
    keys: tuple[MatchKey, ...]
    tools: list[dict[str, Any]]
    messages: list[Message]
    """With weights: replies are trained."""
    is_extended: bool = False


def build_conversations(calls: Sequence[RecordedCall]) -> list[tuple[list[Message], list[dict[str, Any]]]]:
    """The conversations of one rollout, each with its tools; a reply that two of them share is trained in the first."""
    ended: list[_Conversation] = []
    for call in calls:
        keys = compute_match_keys(parse_messages([*call.messages, call.reply]))
        before = [each for each in ended if each.tools == call.tools and keys[: len(each.keys)] == each.keys != keys]
        start = max(before, key=lambda each: len(each.keys), default=None)
        known: list[Message] = []
        if start is not None:
            known = exclude_replies(start.messages) if start.is_extended else start.messages
            start.is_extended = True
        messages = [*known, *exclude_replies(call.messages[len(known) :]), call.reply]
        ended.append(_Conversation(keys=keys, tools=call.tools, messages=messages))
    return [(each.messages, each.tools) for each in ended if not each.is_extended]


def run_stage(config: CollectConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Collect into `conversations.jsonl`, unless an earlier attempt was killed after it was complete."""
    path = out_dir / ROWS_FILE
    if not path.exists():
        workflow, judge = load_functions(config)
        collect(config, workflow=workflow, judge=judge, build_model=choose_model(config), out=path)
    rows = load_json_lines(path)
    if not rows:
        raise DataError(f"{path} has no row: no rollout reached min_reward={config.min_reward:g}")
    return StageResult(
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures={"conversations": len(rows), "mean reward": sum(row["reward"] for row in rows) / len(rows)},
    )
