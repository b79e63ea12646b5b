"""Weak scaling of a whole GRPO step over the GPUs of one host: rollouts, rewards, advantages, update.

Each number of ranks trains `--tasks` tasks a rank of a model with random weights. One rank runs without a process
group, as `tunesmith tune` does on one GPU. The table says where the time of a step goes: sampling, training, waiting
for the slowest rank, collectives of gradients and weights, and handing groups between ranks on the host. The raw
results also have the seconds of rollouts and of the update of each rank and step: a rank whose GPU or host is slower
has long rollouts and a short `train_wait_s`, and the others wait for it.

    python benchmarks/ranks.py --gpus 1,2,4 --shape qwen3-0.6b --tasks 64 --group 8 --max-new-tokens 256
    python benchmarks/ranks.py --gpus 1,2 --device cpu --shape pocket --tasks 4 --max-new-tokens 16
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from questions import list_questions
from report import describe_environment
from shapes import SHAPES, count_multiplied, save_random_model

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.cluster.place import find_place
from tunesmith.cluster.process_group import open_ranks
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.experience.batch import BatchSize
from tunesmith.experience.replay import ReplayBuffer
from tunesmith.loop import StepParts, run_step
from tunesmith.model.load import resolve_device
from tunesmith.model.prepare import prepare_model
from tunesmith.pipeline.session.actors import load_actors
from tunesmith.pipeline.session.load_config import build_config
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.rank_shares import RankLedger
from tunesmith.shared_step import end_run, follow
from tunesmith.tasks.selector import build_sequential
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import JudgeOutput, Task, WorkflowOutput

PARTS = (
    "perf/rollout_s", "perf/train_s", "perf/rollout_wait_s", "perf/train_wait_s", "perf/communication_s",
    "perf/exchange_s", "perf/collect_s",
)  # fmt: skip
PEAK_FLOPS = 989e12
"""Of an H200, bfloat16 without sparsity."""


async def ask(task: dict[str, Any], model: ChatModel) -> WorkflowOutput:
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content or "")


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """A reward that differs within groups, so that every rollout trains."""
    return JudgeOutput(reward=float(sum(map(ord, response)) % 11))


class GarbageTimes:
    """Seconds of Python's garbage collector since the last call of `take`."""

    def __init__(self) -> None:
        self._started, self._total, self._longest = 0.0, 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            seconds = time.perf_counter() - self._started
            self._total, self._longest = self._total + seconds, max(self._longest, seconds)

    def take(self) -> dict[str, float]:
        taken = {"garbage_s": self._total, "longest_garbage_s": self._longest}
        self._total = self._longest = 0.0
        return taken


class TimedTrainer(Trainer):
    """Keeps the times of each step on this rank; those that end in `_at` are of one clock for all ranks of a host."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.times: list[dict[str, float]] = []
        self._garbage = GarbageTimes()
        self._queued, self._finish = 0.0, self._host_work.finish
        self._host_work.finish = self._note_queued

    def _note_queued(self) -> None:
        self._queued = self._queued or time.perf_counter()
        self._finish()

    def step(self, *arguments: Any, **options: Any) -> dict[str, float]:
        before, started = self._garbage.take(), time.perf_counter()
        self._queued = 0.0
        metrics = super().step(*arguments, **options)
        ended, garbage = time.perf_counter(), self._garbage.take()
        self.times.append(
            {
                "train_s": ended - started, "train_wait_s": 0.0, "communication_s": 0.0, "train_at": started,
                "slack_s": ended - self._queued, "collect_s": 0.0, "rollout_garbage_s": before["garbage_s"],
                "longest_rollout_garbage_s": before["longest_garbage_s"], "train_garbage_s": garbage["garbage_s"],
            }
        )  # fmt: skip
        return metrics

    def take_times(self) -> dict[str, float]:
        taken = super().take_times()
        if self.times:
            self.times[-1] |= {name.removeprefix("perf/"): seconds for name, seconds in taken.items()}
        return taken


@dataclass(slots=True, kw_only=True)
class TimedLedger(RankLedger):
    """Keeps the seconds of rollouts of each step and rank, on the first rank, and when this rank's rollouts ended."""

    rollout_times: list[list[float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def keep(self, *arguments: Any) -> None:
        self.ends.append(time.perf_counter())
        RankLedger.keep(self, *arguments)

    def clear(self) -> None:
        self.rollout_times.append(self.rollout_s)
        RankLedger.clear(self)


def build_settings(arguments: argparse.Namespace, *, num_ranks: int, local_rank: int) -> RunConfig:
    return build_config(
        {
            "model": {
                "path": arguments.model,
                "device": "cpu" if arguments.device == "cpu" else f"cuda:{local_rank}",
                "max_model_len": arguments.max_model_len,
                "max_tokens": arguments.max_new_tokens,
            },
            "algorithm": {
                "algorithm_type": "grpo", "group_size": arguments.group, "batch_size": arguments.tasks * num_ranks,
            },
            "trainer": {
                "learning_rate": 1e-6, "mismatch_stop": 1e9, "mismatch_warn": 1e9,
                "has_gradient_checkpointing": arguments.checkpointing,
                "max_tokens_per_row": arguments.max_tokens_per_row,
            },
            "rollout": {"chat_model": "openai", "max_concurrency": arguments.tasks * arguments.group},
            "engine": {
                "max_num_seqs": max(256, arguments.tasks * arguments.group), "kv_cache_gib": arguments.kv_cache_gib,
            },
        }
    )  # fmt: skip


def list_tasks(num_tasks: int) -> list[Task]:
    rows = list_questions(num_tasks)
    return [Task(task_id=f"q/{index}", index=index, row={"question": row}) for index, row in enumerate(rows)]


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank of one measurement; the first writes the result."""
    place = find_place()
    config = build_settings(arguments, num_ranks=place.world_size, local_rank=place.local_rank)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    with open_ranks(place, device=resolve_device(config.model.device), timeout_s=900) as ranks:
        policy, actors = load_actors(
            config, workflow=ask, judge=judge, build_model=lambda e, o: ChatModel(e, options=o), ranks=ranks
        )
        actors = replace(actors, ledger=TimedLedger())
        trainer = TimedTrainer(
            policy.model, config.trainer, config.algorithm, max_model_len=config.model.max_model_len,
            num_total_steps=arguments.steps + 2, ranks=ranks,
            has_sharded_gradients=True if arguments.sharded_gradients else None,
        )  # fmt: skip
        if ranks.is_first:
            history = run_lockstep(run_steps(arguments, config, actors, trainer, ranks), config.rollout)
        else:
            history = run_lockstep(follow(actors, trainer), config.rollout)
        memory = 0 if arguments.device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
        for step, rollouts_at in zip(trainer.times, actors.ledger.ends, strict=False):
            step["rollouts_at"] = rollouts_at
        gathered = ranks.all_gather_objects({"memory_gib": memory, "steps": trainer.times})
    if place.world_size > 1 and place.is_first:
        for rank, each in enumerate(gathered):
            for step, seconds in zip(each["steps"], actors.ledger.rollout_times, strict=True):
                step["rollout_s"] = seconds[rank]
    if place.is_first:
        result = {"num_ranks": place.world_size, "steps": history, "ranks": gathered}
        Path(arguments.worker).write_text(json.dumps(result | {"environment": describe_environment(arguments.device)}))


async def run_steps(
    arguments: argparse.Namespace, config: RunConfig, actors: Actors, trainer: Trainer, ranks: Ranks
) -> list[dict[str, float]]:
    num_tasks = config.algorithm.batch_size
    tasks = list_tasks(4 * num_tasks)
    parts = StepParts(
        tasks=TaskFeed(tasks, build_sequential(np.zeros((len(tasks), 0)), seed=0)),
        actors=actors,
        algorithm=resolve_algorithm(config.algorithm),
        trainer=trainer,
        replay=ReplayBuffer(config.experience.replay, seed=0),
        size=BatchSize(num_groups=num_tasks, max_tasks=num_tasks),
        group_size=arguments.group,
        seed=0,
        max_failure_rate=0.0,
    )
    history: list[dict[str, float]] = []
    started = time.perf_counter()
    for step in range(1, arguments.steps + arguments.warmup + 1):
        result = await run_step(parts, step=step)
        ended = time.perf_counter()  # without waiting for the device, as in `tune`: its last kernels are in the next
        history.append(result.metrics | {"slack_s": trainer.times[-1]["slack_s"], "seconds": ended - started})
        started = ended
        print(f"{ranks.world_size} ranks, step {step}: {history[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
    if not ranks.is_alone:
        end_run(ranks, history)
    return history


def measure(
    arguments: argparse.Namespace, num_ranks: int, model: str, *, is_independent: bool = False
) -> dict[str, Any]:
    """Start the ranks, or as many independent processes, and read what they have written."""
    with tempfile.TemporaryDirectory() as folder:
        given = [
            "--model", model, "--device", arguments.device, "--tasks", str(arguments.tasks),
            "--group", str(arguments.group), "--max-new-tokens", str(arguments.max_new_tokens),
            "--max-model-len", str(arguments.max_model_len), "--steps", str(arguments.steps),
            "--warmup", str(arguments.warmup), *(["--checkpointing"] if arguments.checkpointing else []),
            *(["--sharded-gradients"] if arguments.sharded_gradients else []),
            "--max-tokens-per-row", str(arguments.max_tokens_per_row),
            *([] if arguments.kv_cache_gib is None else ["--kv-cache-gib", str(arguments.kv_cache_gib)]),
        ]  # fmt: skip
        num_threads = max((os.cpu_count() or 1) // max(map(int, arguments.gpus.split(","))), 1)
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(num_threads)} | os.environ
        outs = [Path(folder) / f"result-{index}.json" for index in range(num_ranks if is_independent else 1)]
        if is_independent:
            processes = [
                subprocess.Popen(
                    [sys.executable, __file__, "--worker", str(out), *given],
                    env=environment | {"CUDA_VISIBLE_DEVICES": str(index)},
                )
                for index, out in enumerate(outs)
            ]
            statuses = [process.wait() for process in processes]
            if any(statuses):
                raise SystemExit("an independent process failed")
        else:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
            command = [sys.executable, *(launcher if num_ranks > 1 else []), __file__, "--worker", str(outs[0]), *given]
            subprocess.run(command, env=environment, check=True)
        results = [json.loads(out.read_text()) for out in outs]
    slowest = max(results, key=lambda result: sum(row["seconds"] for row in result["steps"][arguments.warmup :]))
    if not is_independent:
        return slowest
    ranks = [rank | {"steps": result["steps"]} for result in results for rank in result["ranks"]]
    return slowest | {"num_ranks": num_ranks, "is_independent": True, "ranks": ranks}


def describe_utilization(shape: str, rows: list[dict[str, float]], training: float) -> str:
    """Model FLOP utilization of the update: 6 a parameter and token, without attention and recomputation."""
    if shape not in SHAPES:
        return ""
    tokens = statistics.median(row["train/num_tokens"] / row.get("cluster/num_ranks", 1) for row in rows)
    return f"{6 * count_multiplied(shape) * tokens / training / PEAK_FLOPS:.0%}".replace("%", " %")


def show(results: list[dict[str, Any]], *, shape: str, warmup: int) -> None:
    """The table, and its rows for `docs/scaling.md`: medians over the measured steps."""
    print(f"\n{'ranks':>5}{'step s':>9}{'scaling':>9}{'tok/s':>10}{'GiB':>7}", end="")
    print("".join(f"{name.removeprefix('perf/').removesuffix('_s'):>15}" for name in PARTS))
    base, table = None, []
    for result in results:
        rows = result["steps"][warmup:]
        seconds = statistics.median(row["seconds"] for row in rows)
        base = base or seconds
        tokens = statistics.fmean(row["rollout/num_sampled_tokens"] for row in rows)
        tokens *= result["num_ranks"] if result.get("is_independent") else 1
        memory = max(rank["memory_gib"] for rank in result["ranks"])
        name = f"{result['num_ranks']}{'*' if result.get('is_independent') else ''}"
        line = f"{name:>5}{seconds:>9.3f}{base / seconds:>9.1%}{tokens / seconds:>10.0f}{memory:>7.1f}"
        parts = [statistics.median(row.get(part, 0.0) for row in rows) for part in PARTS]
        print(line + "".join(f"{part:>15.3f}" for part in parts))
        rollouts, training, *waits, communication, exchange, collect = parts
        cells = [f"{seconds:.3f}", "" if result is results[0] else f"{base / seconds:.1%}".replace("%", " %")]
        cells += [f"{rollouts:.3f}", f"{training:.3f}"]
        is_alone = result["num_ranks"] == 1 or result.get("is_independent")
        cells += [""] * 4 if is_alone else [f"{each:.3f}" for each in (sum(waits), communication, exchange, collect)]
        cells += [f"{memory:.1f}", describe_utilization(shape, rows, training)]
        table.append(f"| {shape} | {name} | " + " | ".join(cells) + " |")
    names = ["model", "GPUs", "step", "scaling", "rollouts", "training", "waits", "communication", "exchange"]
    names += ["collection", "GiB per GPU", "MFU of training"]
    print("\n| " + " | ".join(names) + " |\n|---|" + "---:|" * (len(names) - 1))
    print("\n".join(table))
    if any(result.get("is_independent") for result in results):
        print("*: independent processes; the slowest one's times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2", help="numbers of ranks, with commas; the first is the base")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="device of all ranks")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*SHAPES, "pocket"], help="random weights of it")
    parser.add_argument(
        "--model", help="folder of the model whose tokenizer is used; default: SmolLM2's, else pocket's"
    )
    parser.add_argument("--tasks", type=int, default=64, help="tasks per rank and step")
    parser.add_argument("--group", type=int, default=8, help="rollouts per task")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens per rollout")
    parser.add_argument("--max-model-len", type=int, default=1024, help="as model.max_model_len")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them: compilation, CUDA graphs")
    parser.add_argument("--checkpointing", action="store_true", help="as trainer.has_gradient_checkpointing")
    parser.add_argument("--sharded-gradients", action="store_true", help="as cluster.has_sharded_gradients=true")
    parser.add_argument("--max-tokens-per-row", type=int, default=16384, help="as trainer.max_tokens_per_row")
    parser.add_argument("--kv-cache-gib", type=float, help="as engine.kv_cache_gib")
    parser.add_argument("--independent", action="store_true", help="also as many processes that share nothing")
    parser.add_argument("--out", help="JSON file; default: results/ranks_DEVICE/SHAPE.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_rank(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(arguments, Path(folder))
        results = []
        for number in map(int, arguments.gpus.split(",")):
            if arguments.independent and number > 1:
                results.append(measure(arguments, number, model, is_independent=True))
            results.append(measure(arguments, number, model))
    out = Path(arguments.out or f"results/ranks_{arguments.device}/{arguments.shape}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "worker", "model")}
    out.write_text(json.dumps({"arguments": settings, "results": results}, indent=1) + "\n")
    show(results, shape=arguments.shape, warmup=arguments.warmup)
    print(f"raw: {out}")


def save_model(arguments: argparse.Namespace, folder: Path) -> str:
    """The model of the shape, with a tokenizer that is there without a download."""
    if arguments.shape == "pocket":
        return str(prepare_model("pocket", folder / "pocket"))
    tokenizer = arguments.model
    if tokenizer is None:
        try:
            tokenizer = str(prepare_model("smollm2-135m-instruct", folder / "smollm2"))
        except (OSError, ValueError):
            tokenizer = str(prepare_model("pocket", folder / "pocket"))
    save_random_model(arguments.shape, folder / "model", tokenizer=tokenizer, device=torch.device(arguments.device))
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    return str(folder / "model")


if __name__ == "__main__":
    main()
