"""GRPO steps that sample with vLLM: seconds of rollouts, of the weight push and of training, and the mismatch.

A model of random weights is trained in this process and sampled by vLLM in its own, on the same GPU, on others
(`--devices`), or split over several (`--tensor-parallel`). `--engines vllm,tunesmith` also runs the engine in this
process on the same work. One process per engine, vLLM's interpreter being this one, or `--python`. With `--ranks` the
weights are trained sharded over as many GPUs (`cluster.has_sharded_weights`), and one vLLM samples for all of them.

The first run on a machine compiles kernels, once: start-up, rollouts and updates of the first step are then a minute
longer. `--eager` and `--plain-layers` leave out what vLLM and the trainer compile with torch.compile.

    python benchmarks/vllm_engine.py --shape qwen3-0.6b
    python benchmarks/vllm_engine.py --shape qwen3-0.6b --tasks 16 --max-new-tokens 64 --steps 1 --warmup 1 --eager
    python benchmarks/vllm_engine.py --shape qwen2.5-7b --ranks 2 --tensor-parallel 2 --tasks 32 --checkpointing
    python benchmarks/vllm_engine.py --shape qwen2.5-7b --lora --tasks 32 --gpu-memory-share 0.4
    python benchmarks/vllm_engine.py --shape qwen2.5-7b --lora --tasks 32 --devices 0,1 --tensor-parallel 2
    python benchmarks/vllm_engine.py --shape pocket --device cpu --tasks 2 --group 4 --max-new-tokens 16 --eager
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import ask, judge, list_tasks, save_model
from report import describe_environment
from shapes import SHAPES

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.cluster.place import find_place
from tunesmith.cluster.process_group import open_ranks
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.experience.batch import BatchSize
from tunesmith.experience.replay import ReplayBuffer
from tunesmith.loop import StepParts, run_step
from tunesmith.pipeline.session.actors import load_actors
from tunesmith.pipeline.session.load_config import build_config
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.shared_step import end_run, follow
from tunesmith.tasks.selector import build_sequential
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.trainer.trainer import Trainer

COLUMNS = {
    "step s": "seconds", "rollout s": "perf/rollout_s", "push s": "perf/weight_push_s", "train s": "perf/train_s",
    "mismatch": "mismatch/kl", "max ratio": "mismatch/max_log_ratio",
}  # fmt: skip


def build_settings(arguments: argparse.Namespace, *, local_rank: int) -> RunConfig:
    engine: dict[str, Any] = {"max_num_seqs": arguments.tasks * arguments.group, "kind": arguments.worker_engine}
    if arguments.worker_engine == "vllm":
        engine["tensor_parallel_size"] = arguments.tensor_parallel
        engine["vllm"] = {
            "python": arguments.python, "gpu_memory_share": arguments.gpu_memory_share,
            "weight_transfer": arguments.weight_transfer, "has_eager": arguments.eager,
            "devices": None if arguments.devices is None else [int(each) for each in arguments.devices.split(",")],
        }  # fmt: skip
    if arguments.device == "cpu":
        engine["kv_cache_gib"] = 0.25
    model: dict[str, Any] = {
        "path": arguments.model,
        "device": "cpu" if arguments.device == "cpu" else f"cuda:{local_rank}",
        "max_model_len": arguments.max_model_len,
        "max_tokens": arguments.max_new_tokens,
    }
    if arguments.lora:
        model["lora"] = {"r": 16, "alpha": 32, "target_modules": "attention"}
    return build_config(
        {
            "model": model,
            "algorithm": {
                "algorithm_type": "grpo", "group_size": arguments.group, "batch_size": arguments.tasks,
            },
            "trainer": {
                "learning_rate": 1e-6, "mismatch_stop": 1e9, "mismatch_warn": 1e9,
                "max_tokens_per_row": arguments.max_tokens_per_row,
                "has_gradient_checkpointing": arguments.checkpointing,
                "has_compiled_layers": not arguments.plain_layers,
            },
            "cluster": {"has_sharded_weights": arguments.ranks > 1},
            "rollout": {"chat_model": "openai", "max_concurrency": arguments.tasks * arguments.group},
            "engine": engine,
        }
    )  # fmt: skip


def run_worker(arguments: argparse.Namespace) -> None:
    """One engine, on this rank; the first writes the metrics of its steps."""
    place = find_place()
    config = build_settings(arguments, local_rank=place.local_rank)
    if place.world_size > 1 and arguments.device == "cpu":
        torch.set_num_threads(1)
    with open_ranks(place, device=torch.device(config.model.device), timeout_s=900) as ranks:
        started = time.perf_counter()
        policy, actors = load_actors(
            config, workflow=ask, judge=judge, build_model=lambda e, o: ChatModel(e, options=o), ranks=ranks
        )
        start_s = time.perf_counter() - started
        note(f"rank {ranks.rank}: model and engine ready after {start_s:.1f} s, {read_memory(arguments)}")
        trainer = Trainer(
            policy.model, config.trainer, config.algorithm, max_model_len=config.model.max_model_len,
            num_total_steps=arguments.steps + arguments.warmup,
            has_separate_sampler=config.engine.has_separate_sampler, ranks=ranks,
        )  # fmt: skip
        note(f"rank {ranks.rank}: trainer ready, {read_memory(arguments)}")
        try:
            if ranks.is_first:
                history = run_lockstep(run_steps(arguments, config, actors, trainer), config.rollout)
            else:
                run_lockstep(follow(actors, trainer), config.rollout)
            memory = ranks.all_gather_objects(read_memory(arguments))
        finally:
            policy.close()
    if not place.is_first:
        return
    result = {"engine": arguments.worker_engine, "start_s": start_s, "ranks": memory, "steps": history}
    result["training_gib"] = max(each["peak_gib"] for each in memory)
    Path(arguments.worker).write_text(json.dumps(result | {"environment": describe_environment(arguments.device)}))


def read_memory(arguments: argparse.Namespace) -> dict[str, float]:
    """GiB of this process on its GPU, now and at most, and of all processes there, now."""
    if arguments.device == "cpu":
        return {"peak_gib": 0.0}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "device_gib": round((total - free) / 2**30, 2),
    }


def note(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def run_steps(
    arguments: argparse.Namespace, config: RunConfig, actors: Actors, trainer: Trainer
) -> list[dict[str, float]]:
    tasks = list_tasks(4 * arguments.tasks)
    parts = StepParts(
        tasks=TaskFeed(tasks, build_sequential(np.zeros((len(tasks), 0)), seed=0)),
        actors=actors,
        algorithm=resolve_algorithm(config.algorithm),
        trainer=trainer,
        replay=ReplayBuffer(config.experience.replay, seed=0),
        size=BatchSize(num_groups=arguments.tasks, max_tasks=arguments.tasks),
        group_size=arguments.group,
        seed=0,
        max_failure_rate=0.0,
    )
    history = []
    for step in range(1, arguments.steps + arguments.warmup + 1):
        started = time.perf_counter()
        result = await run_step(parts, step=step)
        if arguments.device != "cpu":
            torch.cuda.synchronize()
        history.append(result.metrics | {"seconds": time.perf_counter() - started})
        row = history[-1]
        note(
            f"{arguments.worker_engine}, step {step}: {row['seconds']:.3f} s, rollouts {row['perf/rollout_s']:.3f} s, "
            f"push {row.get('perf/weight_push_s', 0.0):.3f} s, training {row['perf/train_s']:.3f} s, mismatch "
            f"{row.get('mismatch/kl', float('nan')):.2e}, {read_memory(arguments)}"
        )
    if not actors.ranks.is_alone:
        end_run(actors.ranks, None)
    return history


def measure(engine: str, model: str, *, num_ranks: int) -> dict[str, Any]:
    """Run one engine in processes of its own and read what the first has written."""
    note(f"the model is saved, {engine} starts")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, *(launcher if num_ranks > 1 else []), __file__, *sys.argv[1:], "--model", model]
        environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ if num_ranks > 1 else None
        subprocess.run([*command, "--worker", str(out), "--worker-engine", engine], check=True, env=environment)
        return json.loads(out.read_text())


def show(results: list[dict[str, Any]], *, warmup: int) -> None:
    """The table: medians over the measured steps, maxima of the mismatch."""
    print(f"\n{'engine':>10}{'start s':>9}{'tok/s':>10}{'GiB':>7}" + "".join(f"{name:>12}" for name in COLUMNS))
    for result in results:
        rows = result["steps"][warmup:]
        tokens = statistics.fmean(row["rollout/num_sampled_tokens"] for row in rows)
        rollout_s = statistics.median(row["perf/rollout_s"] for row in rows)
        line = (
            f"{result['engine']:>10}{result['start_s']:>9.1f}{tokens / rollout_s:>10.0f}{result['training_gib']:>7.1f}"
        )
        for key in COLUMNS.values():
            values = [row.get(key, 0.0) for row in rows]
            is_mismatch = key.startswith("mismatch")
            line += f"{max(values):>12.2e}" if is_mismatch else f"{statistics.median(values):>12.3f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="vllm", help="vllm, tunesmith or both, with a comma")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="device of training")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=[*SHAPES, "pocket"], help="random weights of it")
    parser.add_argument(
        "--model", help="folder of the model whose tokenizer is used; default: SmolLM2's, else pocket's"
    )
    parser.add_argument("--lora", action="store_true", help="train an adapter of rank 16 on attention")
    parser.add_argument("--python", help="as engine.vllm.python")
    parser.add_argument("--devices", help="as engine.vllm.devices, with commas")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="as engine.tensor_parallel_size")
    parser.add_argument("--gpu-memory-share", type=float, default=0.4, help="as engine.vllm.gpu_memory_share")
    parser.add_argument("--weight-transfer", default="memory", help="as engine.vllm.weight_transfer")
    parser.add_argument("--eager", action="store_true", help="as engine.vllm.has_eager")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of training that share the weights")
    parser.add_argument("--plain-layers", action="store_true", help="as trainer.has_compiled_layers=false")
    parser.add_argument("--checkpointing", action="store_true", help="as trainer.has_gradient_checkpointing")
    parser.add_argument("--max-tokens-per-row", type=int, default=16384, help="as trainer.max_tokens_per_row")
    parser.add_argument("--tasks", type=int, default=64, help="tasks of a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts per task")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="most tokens per rollout")
    parser.add_argument("--max-model-len", type=int, default=1024, help="as model.max_model_len")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--out", help="JSON file; default: results/vllm_engine/SHAPE[-lora][-tpN][-ranksN].json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-engine", default="vllm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_worker(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(arguments, Path(folder))
        results = [measure(engine, model, num_ranks=arguments.ranks) for engine in arguments.engines.split(",")]
    kind = ("-lora" if arguments.lora else "") + (
        f"-tp{arguments.tensor_parallel}" if arguments.tensor_parallel > 1 else ""
    )
    kind += f"-ranks{arguments.ranks}" if arguments.ranks > 1 else ""
    out = Path(arguments.out or f"results/vllm_engine/{arguments.shape}{kind}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = ("model", "python", "out", "worker", "worker_engine")
    settings = {key: value for key, value in vars(arguments).items() if key not in hidden}
    out.write_text(json.dumps({"arguments": settings, "results": results}, indent=1) + "\n")
    show(results, warmup=arguments.warmup)
    print(f"raw: {out}")


if __name__ == "__main__":
    main()
