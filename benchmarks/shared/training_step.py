"""Set-up of a GRPO training step: tasks, agent and judge, config, models, trainer, and the processes of ranks.

The benchmarks of a whole step (`step.py`, `staleness.py` and `vllm_engine.py` in `training/`, `ranks.py` and
`staleness_ranks.py` in `ranks/`) build it here and keep what they measure. Their options are attributes of `arguments`,
which `add_step_arguments` declares.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shared.questions import list_questions
from benchmarks.shared.shapes import SHAPES, save_random_model
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.cluster.links import NO_LINKS, Links
from tunesmith.cluster.process_group import RankRoles
from tunesmith.cluster.rank_info import find_rank_info
from tunesmith.cluster.ranks import Ranks
from tunesmith.commands.tune.ranks import RunEnd, build_rank, follow, lead
from tunesmith.config import RunConfig
from tunesmith.experience.batch import BatchSize
from tunesmith.experience.replay import ReplayBuffer
from tunesmith.loop import StepParts, run_step
from tunesmith.model.prepare import prepare_model
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.load_config import build_section
from tunesmith.runs.policy import Policy, load_actors
from tunesmith.tasks.selector import TaskFeed, build_sequential
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import JudgeOutput, Task, WorkflowOutput

TOTAL_STEPS = 10**6
"""More than a benchmark makes, so that groups in flight never run out."""
RANDOM_WEIGHTS = {"learning_rate": 1e-6, "mismatch_stop": 1e9, "mismatch_warn": 1e9}
"""Trainer settings for random weights, whose mismatch is no sign of a defect."""


async def ask(task: Mapping[str, Any], model: ChatModel) -> WorkflowOutput:
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content or "")


async def judge(task: Mapping[str, Any], response: str) -> JudgeOutput:
    """A reward that differs within groups, so that every rollout trains."""
    return JudgeOutput(reward=float(sum(map(ord, response)) % 11))


def list_tasks(num_tasks: int) -> list[Task]:
    return build_tasks([{"question": question} for question in list_questions(num_tasks)])


def build_tasks(rows: Sequence[dict[str, Any]]) -> list[Task]:
    return [Task(task_id=f"q/{index}", index=index, row=row) for index, row in enumerate(rows)]


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark of a step on random weights has; `set_defaults` changes their defaults."""
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="device of training")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*SHAPES, "pocket"], help="random weights of it")
    parser.add_argument(
        "--model", help="folder of the model whose tokenizer is used; default: SmolLM2's, else pocket's"
    )
    parser.add_argument("--group", type=int, default=8, help="rollouts per task")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens per model call")
    parser.add_argument("--max-model-len", type=int, default=1024, help="as model.max_model_len")


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


def build_step_config(arguments: argparse.Namespace, **sections: Mapping[str, Any]) -> RunConfig:
    """GRPO with `--tasks` x `--group` rollouts on the device of this rank; `sections` extend or replace settings."""
    num_rollouts = arguments.tasks * arguments.group
    settings: dict[str, Mapping[str, Any]] = {
        "model": {
            "path": arguments.model,
            "device": "cpu" if arguments.device == "cpu" else f"cuda:{find_rank_info().local_rank}",
            "max_model_len": arguments.max_model_len,
            "max_tokens": arguments.max_new_tokens,
        },
        "algorithm": {"algorithm_type": "grpo", "group_size": arguments.group, "batch_size": arguments.tasks},
        "rollout": {"chat_model": "openai", "max_concurrency": num_rollouts},
        "engine": {"max_num_seqs": num_rollouts},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return build_section(RunConfig, settings)


def load_step_actors(
    config: RunConfig, *, workflow: Callable[..., Any] = ask, judge: Callable[..., Any] = judge, **options: Any
) -> tuple[Policy, Actors]:
    """The policy and the actors; workflows call the model through the in-process endpoint. `options` are further
    arguments of `load_actors`."""
    return load_actors(
        config, workflow=workflow, judge=judge, build_model=lambda e, o: ChatModel(e, options=o), **options
    )


def build_trainer(
    config: RunConfig, policy: Policy, *, num_steps: int, kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    """The trainer of the policy's weights; `options` are further arguments of `Trainer`."""
    return kind(
        policy.model,
        config.trainer,
        config.algorithm,
        max_model_len=config.model.max_model_len,
        num_total_steps=num_steps,
        **options,
    )


def build_feed(tasks: Sequence[Task]) -> TaskFeed:
    """Tasks in their order, again from the first after the last."""
    return TaskFeed(tasks, build_sequential(np.zeros((len(tasks), 0)), seed=0))


ALONE = RankRoles(world=Ranks(), trainers=Ranks())


def build_parts(
    config: RunConfig,
    feed: TaskFeed,
    policy: Policy,
    actors: Actors,
    trainer: Trainer,
    *,
    roles: RankRoles = ALONE,
    links: Links = NO_LINKS,
) -> StepParts:
    """The parts of a step on a single process, or on the first of several ranks."""
    num_tasks, rank = config.algorithm.batch_size, build_rank(config, roles, policy, actors, links)
    return StepParts(
        tasks=feed,
        dispatcher=rank.build_dispatcher(feed, total_steps=TOTAL_STEPS),
        algorithm=resolve_algorithm(config.algorithm),
        trainer=rank.join_trainer(trainer),
        replay=ReplayBuffer(config.experience.replay, seed=0),
        size=BatchSize(num_groups=num_tasks, max_tasks=num_tasks),
        max_failure_rate=0.0,
    )


async def follow_steps(
    config: RunConfig, policy: Policy, actors: Actors, trainer: Trainer | None, roles: RankRoles, links: Links
) -> None:
    """What a rank other than the first runs, without a trainer if it only samples."""
    rank, worker = build_rank(config, roles, policy, actors, links), None
    if roles.is_sampler or not (roles.samplers or config.cluster.has_sharded_weights):
        worker = rank.build_served_worker(sends_tokens=False)
    await follow(rank, worker, None if trainer is None else rank.join_trainer(trainer, worker))


async def lead_steps(
    run_steps: Callable[[], Awaitable[list[dict[str, float]]]],
    parts: StepParts,
    links: Links,
    show_line: Callable[[str], None],
) -> list[dict[str, float]]:
    """What the first rank runs: the steps, after which the other ranks end."""

    async def train() -> RunEnd:
        return RunEnd(result=await run_steps())

    steps: list[dict[str, float]] = (await lead(train, parts.dispatcher, links, show_line)).result
    return steps


async def time_step(parts: StepParts, *, step: int, device: str) -> dict[str, float]:
    """Metrics of a step, and its `seconds` until the device has finished."""
    started = time.perf_counter()
    result = await run_step(parts, step=step)
    if device != "cpu":
        torch.cuda.synchronize()
    return result.metrics | {"seconds": time.perf_counter() - started}


def build_rank_command(num_ranks: int, *overrides: str) -> list[str]:
    """This script with its own options and `overrides`, which take precedence; under torchrun for several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "benchmarks are run with python -m"
    module = ["-m", spec.name]
    return [sys.executable, *(launcher if num_ranks > 1 else []), *module, *sys.argv[1:], *overrides]


def run_ranks(num_ranks: int, *overrides: str, num_threads: int | None = None) -> None:
    """Run the ranks of one measurement to their end, each with `num_threads` threads unless the environment says so."""
    environment = {"GLOO_SOCKET_IFNAME": "lo"} if num_ranks > 1 else {}
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    subprocess.run(build_rank_command(num_ranks, *overrides), env=environment | os.environ, check=True)
