"""Weak scaling of a whole GRPO step over the GPUs of one host: rollouts, rewards, advantages, update.

Each number of ranks trains `--tasks` tasks a rank of a model with random weights. One rank runs without a process
group, as `tunesmith tune` does on one GPU. The table says where the time of a step goes: sampling, training, waiting
for the slowest rank, collectives of gradients and weights, and handing groups between ranks on the host. The raw
results also have the seconds of the update of each rank and step: a rank whose GPU or host is slower has a short
`train_wait_s`, and the others wait for it.

    python -m benchmarks.ranks.ranks --gpus 1,2,4 --shape qwen3-0.6b --tasks 64 --group 8 --max-new-tokens 256
    python -m benchmarks.ranks.ranks --gpus 1,2 --device cpu --shape pocket --tasks 4 --max-new-tokens 16
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.report import describe_environment, describe_settings, save_record
from benchmarks.shared.shapes import SHAPES, count_multiplied
from benchmarks.shared.training_step import (
    RANDOM_WEIGHTS,
    add_step_arguments,
    build_feed,
    build_parts,
    build_rank_command,
    build_step_config,
    build_trainer,
    follow_steps,
    lead_steps,
    list_tasks,
    load_step_actors,
    run_ranks,
    save_model,
)
from tunesmith.cluster.links import connect_links
from tunesmith.cluster.process_group import RankRoles, open_ranks
from tunesmith.cluster.rank_info import find_rank_info
from tunesmith.cluster.ranks import Ranks
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.loop import StepParts, run_step
from tunesmith.model.load import resolve_device
from tunesmith.trainer.trainer import Trainer

PARTS = (
    "perf/rollout_s", "perf/train_s", "perf/rollout_wait_s", "perf/train_wait_s", "perf/communication_s",
    "perf/exchange_s", "perf/collect_s",
)  # fmt: skip
PEAK_FLOPS = 989e12
"""Of an H200, bfloat16 without sparsity."""


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
        self._host_work.finish = self._note_queued  # type: ignore[method-assign]

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


def run_rank(arguments: argparse.Namespace) -> None:
    """One rank of one measurement; the first writes the result."""
    place = find_rank_info()
    config = build_step_config(
        arguments,
        algorithm={"batch_size": arguments.tasks * place.world_size},
        trainer={
            **RANDOM_WEIGHTS,
            "has_gradient_checkpointing": arguments.checkpointing,
            "max_tokens_per_row": arguments.max_tokens_per_row,
        },
        engine={
            "max_num_seqs": max(256, arguments.tasks * arguments.group), "kv_cache_gib": arguments.kv_cache_gib,
        },
    )  # fmt: skip
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    with open_ranks(place, device=resolve_device(config.model.device), timeout_s=900) as ranks:
        policy, actors = load_step_actors(config, ranks=ranks)
        trainer = build_trainer(
            config, policy, num_steps=arguments.steps + 2, kind=TimedTrainer, ranks=ranks,
            has_sharded_gradients=True if arguments.sharded_gradients else None,
        )  # fmt: skip
        assert isinstance(trainer, TimedTrainer)
        roles = RankRoles(world=ranks, trainers=ranks)
        links = connect_links(roles.world, timeout_s=config.cluster.timeout_s)
        if ranks.is_first:
            feed = build_feed(list_tasks(4 * config.algorithm.batch_size))
            parts = build_parts(config, feed, policy, actors, trainer, roles=roles, links=links)
            steps = partial(run_steps, arguments, parts, trainer, ranks)
            history = run_lockstep(lead_steps(steps, parts, links, print), config.rollout)
        else:
            run_lockstep(follow_steps(config, policy, actors, trainer, roles, links), config.rollout)
        memory = 0 if arguments.device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
        gathered = ranks.all_gather_objects({"memory_gib": memory, "steps": trainer.times})
    if place.is_first:
        result = {"num_ranks": place.world_size, "steps": history, "ranks": gathered}
        Path(arguments.worker).write_text(json.dumps(result | {"environment": describe_environment(arguments.device)}))


async def run_steps(
    arguments: argparse.Namespace, parts: StepParts, trainer: TimedTrainer, ranks: Ranks
) -> list[dict[str, float]]:
    history: list[dict[str, float]] = []
    started = time.perf_counter()
    for step in range(1, arguments.steps + arguments.warmup + 1):
        result = await run_step(parts, step=step)
        ended = time.perf_counter()  # without waiting for the device, as in `tune`: its last kernels are in the next
        history.append(result.metrics | {"slack_s": trainer.times[-1]["slack_s"], "seconds": ended - started})
        started = ended
        print(f"{ranks.world_size} ranks, step {step}: {history[-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
    return history


def measure(
    arguments: argparse.Namespace, num_ranks: int, model: str, *, is_independent: bool = False
) -> dict[str, Any]:
    """Start the ranks, or as many independent processes, and read what they have written."""
    num_threads = max((os.cpu_count() or 1) // max(map(int, arguments.gpus.split(","))), 1)
    with tempfile.TemporaryDirectory() as folder:
        outs = [str(Path(folder) / f"result-{index}.json") for index in range(num_ranks if is_independent else 1)]
        if is_independent:
            environment = {"OMP_NUM_THREADS": str(num_threads)} | os.environ
            processes = [
                subprocess.Popen(
                    build_rank_command(1, "--worker", out, "--model", model),
                    env=environment | {"CUDA_VISIBLE_DEVICES": str(index)},
                )
                for index, out in enumerate(outs)
            ]
            statuses = [process.wait() for process in processes]
            if any(statuses):
                raise SystemExit("an independent process failed")
        else:
            run_ranks(num_ranks, "--worker", outs[0], "--model", model, num_threads=num_threads)
        results = [json.loads(Path(out).read_text()) for out in outs]
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
    add_step_arguments(parser)
    parser.add_argument("--tasks", type=int, default=64, help="tasks per rank and step")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them: compilation, CUDA graphs")
    parser.add_argument("--checkpointing", action="store_true", help="as trainer.has_gradient_checkpointing")
    parser.add_argument("--sharded-gradients", action="store_true", help="as cluster.has_sharded_gradients=true")
    parser.add_argument("--max-tokens-per-row", type=int, default=16384, help="as trainer.max_tokens_per_row")
    parser.add_argument("--kv-cache-gib", type=float, help="as engine.kv_cache_gib")
    parser.add_argument("--independent", action="store_true", help="also as many processes that share nothing")
    parser.add_argument("--out", help="JSON file; default: results/ranks/ranks_DEVICE/SHAPE.json")
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
    out = arguments.out or f"results/ranks/ranks_{arguments.device}/{arguments.shape}.json"
    save_record(out, {"arguments": describe_settings(arguments), "results": results})
    show(results, shape=arguments.shape, warmup=arguments.warmup)
    print(f"raw: {out}")


if __name__ == "__main__":
    main()
