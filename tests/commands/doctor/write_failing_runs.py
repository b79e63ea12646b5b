"""Write the kept folders of runs that fail, one way each, which test_failing_runs.py reads.

Each function below makes a run of the untrained pocket model fail. Its folder is kept without weights: settings that
differ from their defaults, the metrics that checks ask for, the columns of rollouts that they read, rewards by task.

    PYTHONPATH=.:tests/support python tests/commands/doctor/write_failing_runs.py [NAME...]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pyarrow.parquet as pq

import tunesmith.commands.doctor
from small_runs import build_small_run, list_apples, write_splits
from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput
from tunesmith.config import RunConfig
from tunesmith.errors import TunesmithError
from tunesmith.experience.store import SCHEMA
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.runs.load_config import load_section
from tunesmith.storage import RunPaths, encode_json_line, load_json, save_json

FAILING_RUNS = Path(__file__).parent / "failing_runs"
COLUMNS = ["group_index", "run_index", "task_id", "task_index", "reward", "failure_where", "failure_message"]
COLUMNS += ["failure_line"]
TURN_FIELDS = ("sampled_ids", "stop_reason")
METRIC = re.compile(r'"((?:[a-z]+/)[a-z_{}]+)"')
MAX_MESSAGE_CHARS = 400
SMALL = AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-4)


class Start:
    """Starts runs of one name in a temporary folder; the pocket model and the tasks are in it too."""

    def __init__(self, folder: Path, model: str, name: str) -> None:
        self.folder, self.model, self.name = folder, model, name
        self.data = write_splits(folder / "data", list_apples(60))

    @property
    def root(self) -> Path:
        return self.folder / "runs/AgentScope" / self.name

    def __call__(self, *overrides: str, steps: int = 2, **arguments: Any) -> None:
        """Call tune(), whose run may stop with an error."""
        start = build_small_run(
            self.folder, self.model, self.data, "monitor.trackers=[]", "save_interval_steps=1000", steps=steps,
            max_tokens=12, algorithm=SMALL, experiment_name=self.name,
        )  # fmt: skip
        with contextlib.suppress(TunesmithError):
            start(*overrides, **arguments)


class SamplingTime:
    """Seconds from the first call of a run to its first reply, by which tools here are slow on any machine."""

    def __init__(self):
        self.started = self.seconds = None

    async def ask(self, task, model):
        self.started = time.monotonic() if self.started is None else self.started
        output = await ask(task, model)
        self.seconds = time.monotonic() - self.started if self.seconds is None else self.seconds
        return output


async def ask(task, model, **options):
    completion = await model([{"role": "user", "content": task["question"]}], **options)
    return WorkflowOutput(response=completion.choices[0].message.content)


def judge_returns_one_value(run: Start) -> None:
    async def judge(task, response):
        return JudgeOutput(reward=0.5)

    run(judge_func=judge)


def judge_ignores_the_response(run: Start) -> None:
    async def judge(task, response):
        return JudgeOutput(reward=float(int(task["question"].split()[2]) % 5))

    run(judge_func=judge)


def identical_rollouts(run: Start) -> None:
    async def greedy(task, model):
        return await ask(task, model, temperature=0)

    run(workflow_func=greedy, steps=1)


def reward_one_of_32(run: Start, *, usual: float, rare: float) -> None:
    numbers = itertools.count(1)

    async def judge(task, response):
        return JudgeOutput(reward=rare if next(numbers) % 32 == 0 else usual)

    run(judge_func=judge, algorithm=AlgorithmConfig(group_size=4, batch_size=8, learning_rate=1e-4))


def tasks_too_hard(run: Start) -> None:
    reward_one_of_32(run, usual=0.0, rare=1.0)


def tasks_too_easy(run: Start) -> None:
    reward_one_of_32(run, usual=1.0, rare=0.0)


def cut_off_at_max_tokens(run: Start) -> None:
    run(steps=1)


def cut_off_at_the_context(run: Start) -> None:
    run(steps=1, model=TunerModelConfig(model_path=run.model, max_model_len=40, max_tokens=39))


def prompts_that_do_not_fit(run: Start) -> None:
    async def retry(task, model):
        with contextlib.suppress(openai.BadRequestError):
            await ask({"question": "How many? " * 60}, model)
        return await ask(task, model)

    run(steps=1, workflow_func=retry)


def one_rollout_of_four_fails(run: Start) -> None:
    calls = itertools.count()

    async def workflow(task, model):
        output = await ask(task, model)
        if next(calls) % 4 == 0:
            raise RuntimeError("the tool broke")
        return output

    run(steps=1, workflow_func=workflow)


def all_rollouts_fail(run: Start) -> None:
    async def workflow(task, model):
        await ask(task, model)
        raise RuntimeError("the tool broke")

    run(workflow_func=workflow)


def rollouts_time_out(run: Start) -> None:
    async def workflow(task, model):
        output = await ask(task, model)
        if task["question"].startswith("Tom has 1"):
            await asyncio.sleep(60)
        return output

    run("rollout.timeout_s=2", "rollout.max_failure_rate=1", steps=1, workflow_func=workflow)


def run_slow_tools(run: Start, *overrides: str) -> None:
    async def workflow(task, model):
        output = await sampling.ask(task, model)
        await asyncio.sleep(max(1.0, 3 * sampling.seconds))
        return output

    sampling = SamplingTime()
    run(*overrides, steps=1, workflow_func=workflow)


def slow_tools(run: Start) -> None:
    run_slow_tools(run)


def slow_tools_of_few_rollouts(run: Start) -> None:
    run_slow_tools(run, "rollout.max_concurrency=8")


def tools_that_block(run: Start) -> None:
    async def workflow(task, model):
        output = await sampling.ask(task, model)
        time.sleep(max(0.15, sampling.seconds / 2))  # noqa: ASYNC251
        return output

    sampling = SamplingTime()
    run(steps=1, workflow_func=workflow)


def dead_learning_rate(run: Start) -> None:
    run(algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-12))


def dead_learning_rate_of_bfloat16(run: Start) -> None:
    run("model.dtype=bfloat16", algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-9))


def destructive_learning_rate(run: Start) -> None:
    algorithm = AlgorithmConfig(group_size=4, batch_size=4, learning_rate=0.03)
    run("algorithm.kl_coef=0.001", "trainer.num_minibatches=2", steps=6, algorithm=algorithm)


def overfitting(run: Start) -> None:
    async def judge(task, response):
        """Training rewards lower-case letters, which evaluation punishes."""
        share = sum(char.islower() for char in response) / max(len(response), 1)
        return JudgeOutput(reward=share if "is_held_out" not in task else 1 - share)

    rows = [f'{{"question": "Tom has {n} apples. How many?", "is_held_out": true}}\n' for n in range(30)]
    (run.folder / "held_out.jsonl").write_text("".join(rows))
    run(
        "evaluation.at_start=true",
        "evaluation.interval_steps=6",
        steps=12,
        judge_func=judge,
        eval_dataset=DatasetConfig(path=str(run.folder / "held_out.jsonl")),
        algorithm=AlgorithmConfig(group_size=8, batch_size=4, learning_rate=3e-3),
    )


def held_out_reward_without_gain(run: Start) -> None:
    run("evaluation.at_start=true", steps=1, eval_dataset=DatasetConfig(path=str(run.folder / "data/test.jsonl")))


def entropy_collapse(run: Start) -> None:
    numbers = itertools.count(1)

    async def judge(task, response):
        """Half of the reward is for lower-case letters; the other half is almost never given."""
        share = sum(char.islower() for char in response) / max(len(response), 1)
        return JudgeOutput(reward=share / 2 + (next(numbers) % 50 == 0) / 2)

    run(steps=20, judge_func=judge, algorithm=AlgorithmConfig(group_size=8, batch_size=4, learning_rate=1e-2))


RUNS: tuple[Callable[[Start], None], ...] = (
    judge_returns_one_value, judge_ignores_the_response, identical_rollouts, tasks_too_hard, tasks_too_easy,
    cut_off_at_max_tokens, cut_off_at_the_context, prompts_that_do_not_fit, one_rollout_of_four_fails,
    all_rollouts_fail, rollouts_time_out, slow_tools, slow_tools_of_few_rollouts, tools_that_block,
    dead_learning_rate, dead_learning_rate_of_bfloat16, destructive_learning_rate, overfitting,
    held_out_reward_without_gain, entropy_collapse,
)  # fmt: skip


def keep_run(run: Start, kept: Path) -> None:
    """Copy what the checks read of a run."""
    old, new = RunPaths(run.root), RunPaths(kept)
    kept.mkdir(parents=True)
    settings = load_section(RunConfig, old.config).model_dump(mode="json", exclude_defaults=True)
    # YAML reads JSON, and a line is shorter
    text = json.dumps(settings, indent=1).replace(str(run.folder), "work").replace(run.model, "work/pocket")
    new.config.write_text(text + "\n")
    names = list_metric_names()
    records = (keep_metrics(each, names) for each in load_metrics(old.metrics))
    new.metrics.write_bytes(b"".join(map(encode_json_line, records)))
    for path in (old.error, old.last_commit, old.stopped):
        if path.is_file():
            shutil.copy(path, kept)
    for path in sorted(run.root.glob("rollouts/*.parquet")):
        keep_rollouts(path, kept / "rollouts" / path.name)
    for path in sorted(run.root.glob("eval/*.json")):
        results = load_json(path)
        for result in results.values():
            result["tasks"] = [{name: task[name] for name in ("task_id", "rewards")} for task in result["tasks"]]
        save_json(kept / "eval" / path.name, results)


def list_metric_names() -> re.Pattern[str]:
    """The names of metrics in the source of the checks; a part in braces stands for any text."""
    folder = Path(tunesmith.commands.doctor.__file__).parent
    found = {name for path in folder.glob("*.py") for name in METRIC.findall(path.read_text(encoding="utf-8"))}
    return re.compile("eval/.*|" + "|".join(re.sub(r"\{\w+\}", ".+", name) for name in sorted(found)))


def keep_metrics(record: dict[str, Any], names: re.Pattern[str]) -> dict[str, Any]:
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in record.items()
        if name in ("step", "kind") or names.fullmatch(name)
    }


def keep_rollouts(path: Path, kept: Path) -> None:
    table = pq.read_table(path)
    turns = [[{name: turn[name] for name in TURN_FIELDS} for turn in row] for row in table.column("turns").to_pylist()]
    messages = [each and each[:MAX_MESSAGE_CHARS] for each in table.column("failure_message").to_pylist()]
    table = table.select(COLUMNS)
    table = table.set_column(COLUMNS.index("failure_message"), "failure_message", pa.array(messages, pa.string()))
    turn = pa.struct({"sampled_ids": pa.list_(pa.int32()), "stop_reason": pa.string()})
    table = table.append_column("turns", pa.array(turns, pa.list_(turn))).replace_schema_metadata(SCHEMA.metadata)
    kept.parent.mkdir(exist_ok=True)
    pq.write_table(table, kept, compression="zstd", write_statistics=False)


def main(names: list[str]) -> None:
    from tunesmith.model.prepare import prepare_model

    with tempfile.TemporaryDirectory() as folder:
        model = str(prepare_model("pocket", Path(folder) / "pocket"))
        for fail in RUNS:
            if names and fail.__name__ not in names:
                continue
            run = Start(Path(folder), model, fail.__name__)
            fail(run)
            shutil.rmtree(FAILING_RUNS / run.name, ignore_errors=True)
            keep_run(run, FAILING_RUNS / run.name)
            shutil.rmtree(run.root)


if __name__ == "__main__":
    main(sys.argv[1:])
