"""Rollouts in flight on one and two GPUs: trained tokens a second with slow tools (`staleness.py`).

Each layout is a run of its own: `1` samples and trains on one GPU, `2` on two, and `1+1` trains on one GPU while the
other samples (`cluster.sampling_ranks: 1`). All have the same agents in flight: those of `--tasks` tasks a step and of
the next `max_staleness` steps. The first tasks have no sleeps: compilation, CUDA graphs.

    python benchmarks/staleness_ranks.py --layouts 1 2 1+1 --staleness 1
    python benchmarks/staleness_ranks.py --device cpu --shape pocket --tasks 2 --group 2 --max-new-tokens 8 --seconds 2
"""

from __future__ import annotations

import argparse
import asyncio
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

import numpy as np
import torch
from ranks import judge, list_tasks, save_model
from report import describe_environment
from shapes import SHAPES
from sleeps import Sleeps

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.cluster.place import find_place
from tunesmith.cluster.process_group import open_ranks
from tunesmith.cluster.roles import RankRoles, split_ranks
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.experience.batch import BatchSize
from tunesmith.experience.replay import ReplayBuffer
from tunesmith.loop import StepParts, run_step
from tunesmith.pipeline.rl.staleness import build_in_flight, build_member, build_sampling_rank
from tunesmith.pipeline.session.actors import load_actors
from tunesmith.pipeline.session.load_config import build_config
from tunesmith.pipeline.session.placement import place_engine
from tunesmith.pipeline.session.policy import Policy
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.shared_step import end_run, follow
from tunesmith.tasks.selector import build_sequential
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Task, WorkflowOutput

TOTAL_STEPS = 10**6


async def use_tools(task: dict[str, Any], model: ChatModel, *, num_calls: int, sleeps: Sleeps) -> WorkflowOutput:
    """Model calls with a slow tool between them."""
    messages = [{"role": "user", "content": task["question"]}]
    for call in range(num_calls + 1):
        reply = (await model(messages)).choices[0].message.content or ""
        if call < num_calls:
            await asyncio.sleep(0.0 if task["is_warm"] else sleeps.draw())
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "The tool is done."}]
    return WorkflowOutput(response=reply)


def read_layout(layout: str) -> tuple[int, int]:
    """Number of ranks, and of those that only sample."""
    trainers, _, samplers = layout.partition("+")
    return int(trainers) + int(samplers or 0), int(samplers or 0)


def build_settings(arguments: argparse.Namespace) -> RunConfig:
    num_ranks, num_samplers = read_layout(arguments.layouts[0])
    num_agents = arguments.tasks * arguments.group
    place = find_place()
    config = build_config(
        {
            "model": {
                "path": arguments.model,
                "device": "cpu" if arguments.device == "cpu" else f"cuda:{place.local_rank}",
                "max_model_len": 1024,
                "max_tokens": arguments.max_new_tokens,
            },
            "algorithm": {"algorithm_type": "grpo", "group_size": arguments.group, "batch_size": arguments.tasks},
            "trainer": {"learning_rate": 1e-5, "mismatch_stop": 1e9, "mismatch_warn": 1e9},
            "rollout": {
                "chat_model": "openai",
                "max_staleness": arguments.staleness[0],
                "max_concurrency": num_agents * (arguments.staleness[0] + 1) // (num_samplers or num_ranks),
            },
            "engine": {"max_num_seqs": num_agents},
            "cluster": {"sampling_ranks": num_samplers},
        }
    )
    if num_samplers and place.rank < num_ranks - num_samplers:
        config = config.model_copy(update={"engine": place_engine(config)})
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
    config, place = build_settings(arguments), find_place()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    with open_ranks(place, device=torch.device(config.model.device), timeout_s=600) as world:
        roles = split_ranks(world, num_samplers=config.cluster.sampling_ranks, timeout_s=600)
        sleeps = Sleeps(median_s=arguments.median_s, p99_s=arguments.p99_s, seed=1 + world.rank)
        load = partial(
            load_actors, config, workflow=partial(use_tools, num_calls=arguments.calls, sleeps=sleeps), judge=judge,
            build_model=lambda e, o: ChatModel(e, options=o),
        )  # fmt: skip
        if roles.is_sampler:
            policy, actors = load(has_trainer=False)
            run_lockstep(build_sampling_rank(config, policy, actors, roles).run(), config.rollout)
        else:
            policy, actors = load(ranks=roles.trainers, has_rollouts=not roles.samplers)
            trainer = Trainer(
                policy.model, config.trainer, config.algorithm, max_model_len=config.model.max_model_len,
                num_total_steps=TOTAL_STEPS, ranks=roles.trainers,
            )  # fmt: skip
            if world.is_first:
                lead(arguments, config, policy, actors, trainer, roles)
            else:
                member = build_member(config, policy, actors, roles)
                run_lockstep(follow(actors, trainer, None, member), config.rollout)
        roles.share_result()


def lead(
    arguments: argparse.Namespace, config: RunConfig, policy: Policy, actors: Actors, trainer: Trainer, roles: RankRoles
) -> None:
    tasks = list_rows(arguments)
    feed = TaskFeed(tasks, build_sequential(np.zeros((len(tasks), 0)), seed=0))
    actors, in_flight = build_in_flight(config, policy, actors, feed, roles, total_steps=TOTAL_STEPS)
    assert in_flight is not None
    parts = StepParts(
        tasks=feed,
        actors=actors,
        algorithm=resolve_algorithm(config.algorithm),
        trainer=trainer,
        replay=ReplayBuffer(config.experience.replay, seed=0),
        size=BatchSize(num_groups=arguments.tasks, max_tasks=arguments.tasks),
        group_size=arguments.group,
        seed=0,
        max_failure_rate=0.0,
        in_flight=in_flight,
    )
    steps = run_lockstep(run_steps(arguments, parts), config.rollout)
    end_run(roles.trainers, None)
    result = {"layout": arguments.layouts[0], "staleness": arguments.staleness[0], "steps": steps}
    if arguments.device == "cuda":
        result["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    Path(arguments.worker).write_text(json.dumps(result))


async def run_steps(arguments: argparse.Namespace, parts: StepParts) -> list[dict[str, float]]:
    """Steps until `--seconds` have passed after those of the warm-up and those that fill the groups in flight."""
    history: list[dict[str, float]] = []
    assert parts.in_flight is not None
    num_unmeasured = arguments.warmup + arguments.staleness[0] + arguments.filling
    measured_s = 0.0
    while measured_s < arguments.seconds:
        started = time.perf_counter()
        metrics = (await run_step(parts, step=len(history) + 1)).metrics
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        is_measured = len(history) >= num_unmeasured
        measured_s += seconds if is_measured else 0.0
        history.append(metrics | {"seconds": seconds, "is_measured": float(is_measured)})
        print(f"{arguments.layouts[0]}, step {len(history)}: {seconds:.2f} s", file=sys.stderr, flush=True)
    await parts.in_flight.close()
    return history


def measure(arguments: argparse.Namespace, layout: str, staleness: int) -> dict[str, Any]:
    num_ranks, _ = read_layout(layout)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        given = ["--worker", str(out), "--layouts", layout, "--staleness", str(staleness)]
        for name in (
            "model", "device", "tasks", "group", "calls", "max_new_tokens", "seconds", "warmup", "filling", "median_s",
            "p99_s",
        ):  # fmt: skip
            given += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1" if arguments.device == "cpu" else "8"}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [sys.executable, *(launcher if num_ranks > 1 else []), __file__, *given]
        subprocess.run(command, env=environment | os.environ, check=True)
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
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="smollm2-135m", choices=[*SHAPES, "pocket"], help="random weights of it")
    parser.add_argument("--model", help="folder of the model whose tokenizer is used")
    parser.add_argument("--tasks", type=int, default=64, help="tasks per step")
    parser.add_argument("--group", type=int, default=8, help="rollouts per task")
    parser.add_argument("--calls", type=int, default=2, help="tool calls per rollout")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="most tokens per model call")
    parser.add_argument("--seconds", type=float, default=30.0, help="least time measured for each layout")
    parser.add_argument("--warmup", type=int, default=3, help="steps without sleeps before")
    parser.add_argument("--filling", type=int, default=2, help="steps with sleeps that are not measured")
    parser.add_argument("--median-s", type=float, default=1.0, help="median of the sleeps")
    parser.add_argument("--p99-s", type=float, default=20.0, help="99th percentile of the sleeps")
    parser.add_argument("--out", help="JSON file; default: results/staleness_ranks_DEVICE/SHAPE.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_worker(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "worker", "model")}
        arguments.model = save_model(arguments, Path(folder))
        results = [
            measure(arguments, layout, staleness) for staleness in arguments.staleness for layout in arguments.layouts
        ]
    out = Path(arguments.out or f"results/staleness_ranks_{arguments.device}/{arguments.shape}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(arguments.device)
    out.write_text(json.dumps({"arguments": settings, "environment": environment, "results": results}, indent=1) + "\n")
    show(results)
    print(f"raw: {out}")


if __name__ == "__main__":
    main()
