"""GRPO steps that sample with vLLM: seconds of rollouts, of the weight push and of training, and the mismatch.

A model of random weights is trained in this process and sampled by vLLM in its own, on the same GPU, on others
(`--devices`), or split over several (`--tensor-parallel`). `--engines vllm,tunesmith` also runs the engine in this
process on the same work. One process per engine, vLLM's interpreter being this one, or `--python`. With `--ranks` the
weights are trained sharded over as many GPUs (`cluster.has_sharded_weights`), and one vLLM samples for all of them.

The first run on a machine compiles kernels, once: start-up, rollouts and updates of the first step are then a minute
longer. `--eager` and `--plain-layers` leave out what vLLM and the trainer compile with torch.compile.

    python -m benchmarks.training.vllm_engine --shape qwen3-0.6b
    python -m benchmarks.training.vllm_engine --shape qwen3-0.6b --tasks 16 --max-new-tokens 64 --steps 1 \\
        --warmup 1 --eager
    python -m benchmarks.training.vllm_engine --shape qwen2.5-7b --ranks 2 --tensor-parallel 2 --tasks 32 \\
        --checkpointing
    python -m benchmarks.training.vllm_engine --shape qwen2.5-7b --lora --tasks 32 --gpu-memory-share 0.4
    python -m benchmarks.training.vllm_engine --shape qwen2.5-7b --lora --tasks 32 --devices 0,1 --tensor-parallel 2
    python -m benchmarks.training.vllm_engine --shape pocket --device cpu --tasks 2 --group 4 --max-new-tokens 16 \\
        --eager
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.report import describe_environment, describe_settings, save_record
from benchmarks.shared.training_step import (
    RANDOM_WEIGHTS,
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
from tunesmith.cluster.links import connect_links
from tunesmith.cluster.process_group import RankRoles, open_ranks
from tunesmith.cluster.rank_info import find_rank_info
from tunesmith.config import RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.loop import StepParts

COLUMNS = {
    "step s": "seconds", "rollout s": "perf/rollout_s", "push s": "perf/weight_push_s", "train s": "perf/train_s",
    "mismatch": "mismatch/kl", "max ratio": "mismatch/max_log_ratio",
}  # fmt: skip


def build_settings(arguments: argparse.Namespace) -> RunConfig:
    engine: dict[str, Any] = {"kind": arguments.worker_engine}
    if arguments.worker_engine == "vllm":
        engine["tensor_parallel_size"] = arguments.tensor_parallel
        engine["vllm"] = {
            "python": arguments.python, "gpu_memory_share": arguments.gpu_memory_share,
            "weight_transfer": arguments.weight_transfer, "has_eager": arguments.eager,
            "devices": None if arguments.devices is None else [int(each) for each in arguments.devices.split(",")],
        }  # fmt: skip
    if arguments.device == "cpu":
        engine["kv_cache_gib"] = 0.25
    return build_step_config(
        arguments,
        model={"lora": {"r": 16, "alpha": 32, "target_modules": "attention"}} if arguments.lora else {},
        trainer={
            **RANDOM_WEIGHTS,
            "max_tokens_per_row": arguments.max_tokens_per_row,
            "has_gradient_checkpointing": arguments.checkpointing,
            "has_compiled_layers": not arguments.plain_layers,
        },
        cluster={"has_sharded_weights": arguments.ranks > 1},
        engine=engine,
    )


def run_worker(arguments: argparse.Namespace) -> None:
    """One engine, on this rank; the first writes the metrics of its steps."""
    place = find_rank_info()
    config = build_settings(arguments)
    if place.world_size > 1 and arguments.device == "cpu":
        torch.set_num_threads(1)
    with open_ranks(place, device=torch.device(config.model.device), timeout_s=900) as ranks:
        started = time.perf_counter()
        policy, actors = load_step_actors(config, ranks=ranks)
        start_s = time.perf_counter() - started
        note(f"rank {ranks.rank}: model and engine ready after {start_s:.1f} s, {read_memory(arguments)}")
        trainer = build_trainer(
            config, policy, num_steps=arguments.steps + arguments.warmup, ranks=ranks,
            has_separate_sampler=config.engine.has_separate_sampler,
        )  # fmt: skip
        note(f"rank {ranks.rank}: trainer ready, {read_memory(arguments)}")
        roles = RankRoles(world=ranks, trainers=ranks)
        links = connect_links(roles.world, timeout_s=config.cluster.timeout_s)
        try:
            if ranks.is_first:
                feed = build_feed(list_tasks(4 * arguments.tasks))
                parts = build_parts(config, feed, policy, actors, trainer, roles=roles, links=links)
                leading = lead_steps(partial(run_steps, arguments, parts), parts, links, note)
                history = run_lockstep(leading, config.rollout)
            else:
                run_lockstep(follow_steps(config, policy, actors, trainer, roles, links), config.rollout)
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


async def run_steps(arguments: argparse.Namespace, parts: StepParts) -> list[dict[str, float]]:
    history = []
    for step in range(1, arguments.steps + arguments.warmup + 1):
        history.append(await time_step(parts, step=step, device=arguments.device))
        row = history[-1]
        note(
            f"{arguments.worker_engine}, step {step}: {row['seconds']:.3f} s, rollouts {row['perf/rollout_s']:.3f} s, "
            f"push {row.get('perf/weight_push_s', 0.0):.3f} s, training {row['perf/train_s']:.3f} s, mismatch "
            f"{row.get('mismatch/kl', float('nan')):.2e}, {read_memory(arguments)}"
        )
    return history


def measure(engine: str, model: str, *, num_ranks: int) -> dict[str, Any]:
    """Run one engine in processes of its own and read what the first has written."""
    note(f"the model is saved, {engine} starts")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        run_ranks(num_ranks, "--model", model, "--worker", str(out), "--worker-engine", engine)
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
    add_step_arguments(parser)
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
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--out", help="JSON file; default: results/training/vllm_engine/SHAPE[-lora][-tpN][-ranksN].json"
    )
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
    out = arguments.out or f"results/training/vllm_engine/{arguments.shape}{kind}.json"
    settings = describe_settings(arguments, hidden=("python", "worker_engine"))
    save_record(out, {"arguments": settings, "results": results})
    show(results, warmup=arguments.warmup)
    print(f"raw: {out}")


if __name__ == "__main__":
    main()
