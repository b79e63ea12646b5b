"""Rollouts in flight on one and two GPUs: trained tokens a second with slow tools (`training/staleness.py`).

Each layout is a run of its own: `1` samples and trains on one GPU, `2` on two, and `1+1` trains on one GPU while the
other samples (`cluster.sampling_ranks: 1`). All have the same agents in flight: those of `--tasks` tasks a step and of
the next `max_staleness` steps. The first tasks have no sleeps: compilation, CUDA graphs.

    python -m benchmarks.ranks.staleness_ranks --layouts 1 2 1+1 --staleness 1
    python -m benchmarks.ranks.staleness_ranks --device cpu --shape pocket --tasks 2 --group 2 --max-new-tokens 8 \\
        --seconds 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.report import describe_environment, describe_settings, save_record
from benchmarks.shared.training_step import (
    RANDOM_WEIGHTS,
    TOTAL_STEPS,
    add_step_arguments,
    build_feed,
    build_parts,
    build_step_config,
    build_trainer,
    follow_steps,
    lead_steps,
    list_tasks,
    load_step_actors,
    run_ranks,
    save_model,
    time_step,
)
from benchmarks.training.slow_tools import Sleeps, use_tools
from tunesmith.cluster.links import Links, connect_links
from tunesmith.cluster.process_group import RankRoles, open_ranks, split_ranks
from tunesmith.cluster.rank_info import find_rank_info
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.loop import StepParts
from tunesmith.rollout.actors import Actors
from tunesmith.runs.policy import Policy
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Task


def read_layout(layout: str) -> tuple[int, int]:
    """Number of ranks, and of those that only sample."""
    trainers, _, samplers = layout.partition("+")
    return int(trainers) + int(samplers or 0), int(samplers or 0)


def build_settings(arguments: argparse.Namespace) -> RunConfig:
    num_ranks, num_samplers = read_layout(arguments.layouts[0])
    staleness, place = arguments.staleness[0], find_rank_info()
    num_in_flight = arguments.tasks * arguments.group * (staleness + 1)
    config = build_step_config(
        arguments,
        trainer=RANDOM_WEIGHTS | {"learning_rate": 1e-5},
        rollout={"max_staleness": staleness, "max_concurrency": num_in_flight // (num_samplers or num_ranks)},
        cluster={"sampling_ranks": num_samplers},
    )
    if num_samplers and place.rank < num_ranks - num_samplers:
        engine = config.engine.model_copy(update={"kv_cache_tokens": config.model.max_model_len})  # never samples
        config = config.model_copy(update={"engine": engine})
    return config


def list_rows(arguments: argparse.Namespace) -> list[Task]:
    """Tasks; those of the warm-up come first."""
    num_warm = arguments.tasks * (arguments.warmup + arguments.staleness[0])
    return [
        Task(task_id=task.task_id, index=task.index, row={**task.row, "is_warm": task.index < num_warm})
        for task in list_tasks(128 * arguments.tasks)
    ]


def run_worker(arguments: argparse.Namespace) -> None:
    """One rank of one layout; the first writes the result."""
    config, place = build_settings(arguments), find_rank_info()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    with open_ranks(place, device=torch.device(config.model.device), timeout_s=600) as world:
        roles = split_ranks(world, num_samplers=config.cluster.sampling_ranks, timeout_s=600)
        sleeps = Sleeps(median_s=arguments.median_s, p99_s=arguments.p99_s, seed=1 + world.rank)
        workflow = partial(use_tools, num_calls=arguments.calls, draw_sleep=sleeps.draw)
        if roles.is_sampler:
            policy, actors = load_step_actors(config, workflow=workflow, has_trainer=False)
            links = connect_links(roles.world, timeout_s=config.cluster.timeout_s)
            run_lockstep(follow_steps(config, policy, actors, None, roles, links), config.rollout)
        else:
            policy, actors = load_step_actors(
                config, workflow=workflow, ranks=roles.trainers, has_rollouts=not roles.samplers
            )
            trainer = build_trainer(config, policy, num_steps=TOTAL_STEPS, ranks=roles.trainers)
            links = connect_links(roles.world, timeout_s=config.cluster.timeout_s)
            if world.is_first:
                run_first(arguments, config, policy, actors, trainer, roles, links)
            else:
                run_lockstep(follow_steps(config, policy, actors, trainer, roles, links), config.rollout)


def run_first(
    arguments: argparse.Namespace,
    config: RunConfig,
    policy: Policy,
    actors: Actors,
    trainer: Trainer,
    roles: RankRoles,
    links: Links,
) -> None:
    parts = build_parts(config, build_feed(list_rows(arguments)), policy, actors, trainer, roles=roles, links=links)
    steps = run_lockstep(lead_steps(partial(run_steps, arguments, parts), parts, links, note), config.rollout)
    parts.trainer.thread.close()
    result = {"layout": arguments.layouts[0], "staleness": arguments.staleness[0], "steps": steps}
    if arguments.device == "cuda":
        result["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    Path(arguments.worker).write_text(json.dumps(result))


async def run_steps(arguments: argparse.Namespace, parts: StepParts) -> list[dict[str, float]]:
    """Steps until `--seconds` have passed after those of the warm-up and those that fill the groups in flight."""
    history: list[dict[str, float]] = []
    num_unmeasured = arguments.warmup + arguments.staleness[0] + arguments.filling
    measured_s = 0.0
    while measured_s < arguments.seconds:
        metrics = await time_step(parts, step=len(history) + 1, device=arguments.device)
        is_measured = len(history) >= num_unmeasured
        measured_s += metrics["seconds"] if is_measured else 0.0
        history.append(metrics | {"is_measured": float(is_measured)})
        print(f"{arguments.layouts[0]}, step {len(history)}: {metrics['seconds']:.2f} s", file=sys.stderr, flush=True)
    return history


def note(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace, layout: str, staleness: int) -> dict[str, Any]:
    num_ranks, _ = read_layout(layout)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        run_ranks(
            num_ranks, "--worker", str(out), "--model", arguments.model, "--layouts", layout,
            "--staleness", str(staleness), num_threads=1 if arguments.device == "cpu" else 8,
        )  # fmt: skip
        return json.loads(out.read_text())


def show(results: list[dict[str, Any]]) -> None:
    """The table: means over the measured steps."""
    print(f"\n{'layout':>8}{'k':>4}{'steps':>7}{'s/step':>9}{'rollout':>9}{'train':>8}{'weights':>9}", end="")
    print(f"{'tokens/s':>10}{'ratio':>7}{'mean lag':>10}{'dropped':>9}{'mismatch':>10}")
    base = None
    for result in results:
        rows = [row for row in result["steps"] if row["is_measured"]]
        seconds = sum(row["seconds"] for row in rows)
        rate = sum(row["train/num_trained_tokens"] for row in rows) / seconds
        base = base or rate
        means = {
            name: statistics.fmean(row.get(name, 0.0) for row in rows)
            for name in ("perf/rollout_s", "perf/train_s", "perf/weights_s", "staleness/mean", "mismatch/kl")
        }
        dropped = sum(row["staleness/num_dropped_groups"] for row in rows)
        trained = sum(row["algorithm/num_trained_groups"] for row in rows)
        print(
            f"{result['layout']:>8}{result['staleness']:>4}{len(rows):>7}{seconds / len(rows):>9.2f}"
            f"{means['perf/rollout_s']:>9.2f}{means['perf/train_s']:>8.2f}{means['perf/weights_s']:>9.3f}"
            f"{rate:>10.0f}{rate / base:>7.2f}{means['staleness/mean']:>10.2f}{dropped / (dropped + trained):>9.1%}"
            f"{means['mismatch/kl']:>10.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["1", "2", "1+1"], help="ranks, or trainers+samplers")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1], help="values of max_staleness")
    add_step_arguments(parser)
    parser.set_defaults(shape="smollm2-135m", max_new_tokens=96)
    parser.add_argument("--tasks", type=int, default=64, help="tasks per step")
    parser.add_argument("--calls", type=int, default=2, help="tool calls per rollout")
    parser.add_argument("--seconds", type=float, default=30.0, help="least time measured for each layout")
    parser.add_argument("--warmup", type=int, default=3, help="steps without sleeps before")
    parser.add_argument("--filling", type=int, default=2, help="steps with sleeps that are not measured")
    parser.add_argument("--median-s", type=float, default=1.0, help="median of the sleeps")
    parser.add_argument("--p99-s", type=float, default=20.0, help="99th percentile of the sleeps")
    parser.add_argument("--out", help="JSON file; default: results/ranks/staleness_ranks_DEVICE/SHAPE.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_worker(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = save_model(arguments, Path(folder))
        results = [
            measure(arguments, layout, staleness) for staleness in arguments.staleness for layout in arguments.layouts
        ]
    out = arguments.out or f"results/ranks/staleness_ranks_{arguments.device}/{arguments.shape}.json"
    environment = describe_environment(arguments.device)
    save_record(out, {"arguments": describe_settings(arguments), "environment": environment, "results": results})
    show(results)
    print(f"raw: {out}")


if __name__ == "__main__":
    main()
