"""A search and Python agent on a fictional world: methods of reinforcement learning from one fine-tuned model.

A world is generated, an expert's conversations are written with the agent's own tools, and the model is fine-tuned on
them. Then every method trains from that model with the same rollouts a step, and is evaluated on held-out questions at
intervals.

- correctness: GRPO with the judge's reward (token F1).
- arpo: the same with branching rollouts.
- efficiency: the reward of few calls and short thoughts with small sigmas, which decay to 0.
- collapse: the same with large sigmas that stay.

    python -m benchmarks.learning.tool_agent --model models/smollm2-135m-instruct --device cuda --out smollm2.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.report import publish
from recipes.world import generate
from recipes.world.conversations import write_conversations
from tunesmith.retrieval.index.search import build_index

JUDGE = "tunesmith.judges.composite:squad_judge"
EFFICIENCY = {"name": "efficiency_reward", "args": {"sigma_tool": 0.2, "sigma_length": 0.1, "format_key": "format"}}
COLLAPSE = {
    "name": "efficiency_reward",
    "args": {"sigma_tool": 4.0, "sigma_length": 0.1, "decay": "none", "format_key": "format"},
}
METHODS: dict[str, dict[str, Any]] = {
    "correctness": {},
    "arpo": {"rollout": {"branching": {}}},
    "efficiency": {"experience": {"operators": [EFFICIENCY]}},
    "collapse": {"experience": {"operators": [COLLAPSE]}},
}
FIGURES = ("em", "f1", "tool_calls", "failed_calls", "format", "reward")


def prepare(arguments: argparse.Namespace, folder: Path) -> None:
    """World, search index, the expert's conversations and fine-tuning; what an earlier call made is kept."""
    world = {
        "num_documents": arguments.documents,
        "num_train": arguments.train,
        "num_test": arguments.test,
        "max_hops": arguments.max_hops,
        "distractors_per_entity": 1,
        "seed": arguments.seed,
    }
    if not (folder / "world/test.jsonl").exists():
        generate(folder / "world", **world)
    if not (folder / "index").exists():
        print(build_index(folder / "world/documents.jsonl", folder / "index"))
    if not (folder / "expert/conversations.jsonl").exists():
        environment = build_environment(str(folder / "index"))
        counts = write_conversations(
            folder / "expert", world=world, environment=environment, num_conversations=arguments.conversations
        )
        print(counts)
    settings = {
        "model": {"path": arguments.model, "device": arguments.device, "max_model_len": 2048},
        "train_dataset": {"path": str(folder / "expert/conversations.jsonl")},
        "num_epochs": arguments.epochs,
        "max_tokens_per_batch": 16384,
        "long_rows": "drop",
        "seed": arguments.seed,
        "trainer": {"learning_rate": arguments.sft_rate, "weight_decay": 0.01, "betas": [0.9, 0.95]},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    call_tunesmith("sft", folder, "sft", arguments.gpus[0], "--out", str(folder / "sft"))


def build_environment(index: str) -> dict[str, Any]:
    return {
        "prompt": "none",
        "max_calls": 6,
        "max_tokens": 400,
        "tools": [
            {"tool": "search", "settings": {"source": "index", "index": index, "top_n": 2}},
            {"tool": "python", "settings": {"wall_s": 5}},
        ],
    }


def build_run(arguments: argparse.Namespace, name: str, folder: Path, seed: int) -> dict[str, Any]:
    """The run file of one method."""
    method = METHODS[name]
    model = {"device": arguments.device, "max_model_len": 2048, "max_tokens": 160}
    return {
        "workflow": "tunesmith.environments:tool_agent",
        "judge": JUDGE,
        "environment": build_environment(str(folder / "index")),
        "name": f"{name}_{seed}",
        "project": "tool_agent",
        "checkpoint_root_dir": str(folder / "runs"),
        "seed": seed,
        "total_steps": arguments.steps,
        "save_interval_steps": arguments.steps,
        "keep_checkpoints": 1,
        "model": {**model, "path": str(folder / "sft/model")},
        "train_dataset": {"path": str(folder / "world/train.jsonl"), "required_fields": ["question", "answer"]},
        "eval_datasets": {"test": {"path": str(folder / "world/test.jsonl")}},
        "evaluation": {"interval_steps": arguments.interval, "at_start": True, "num_samples": 2},
        "algorithm": {
            "algorithm_type": "multi_step_grpo",
            "batch_size": arguments.batch_size,
            "group_size": arguments.group_size,
        },
        "engine": {"max_num_seqs": 512, **({"kv_cache_gib": 8} if arguments.device == "cuda" else {})},
        "rollout": {"max_concurrency": 512, **method.get("rollout", {})},
        "experience": method.get("experience", {}),
        "trainer": {"learning_rate": arguments.rate, "warmup_steps": 4, "betas": [0.9, 0.95], "has_row_graphs": False},
        "monitor": {"log_interval_steps": 5},
    }


def train_all(arguments: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Run all methods and seeds, one process at a time on each GPU; returns the run folder of each."""
    names = []
    for seed in arguments.seeds:
        for method in arguments.methods:
            names.append(f"{method}_{seed}")
            run = yaml.safe_dump(build_run(arguments, method, folder, seed), sort_keys=False)
            (folder / f"{names[-1]}.yaml").write_text(run, encoding="utf-8")
    gpus = arguments.gpus

    def train_on(number: int) -> None:
        for name in names[number :: len(gpus)]:
            call_tunesmith("tune", folder, name, gpus[number])

    with ThreadPoolExecutor(len(gpus)) as pool:
        list(pool.map(train_on, range(len(gpus))))
    return {name: folder / "runs" / "tool_agent" / name for name in names}


def call_tunesmith(command: str, folder: Path, name: str, gpu: str, *options: str) -> None:
    """Run a command in a process of its own, which leaves no GPU memory in use."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES=gpu)
    with (folder / f"{name}.log").open("w") as log:
        call = [sys.executable, "-m", "tunesmith", command, str(folder / f"{name}.yaml"), *options]
        subprocess.run(call, env=environment, stdout=log, stderr=log, check=True)


def read_curve(run: Path) -> list[dict[str, float]]:
    """Held-out figures of each evaluation, with the training totals before it."""
    totals = {"total_tool_calls": 0.0, "total_sampled_tokens": 0.0, "total_s": 0.0}
    points = []
    for line in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if line["kind"] == "train":
            scored = line["rollout/num_trajectories"] - line["rollout/num_failed"]
            inherited = line.get("rollout/num_inherited_tool_calls", 0.0)
            totals["total_tool_calls"] += line.get("rollout/tool_calls/mean", 0.0) * scored - inherited
            totals["total_sampled_tokens"] += line["engine/num_sampled_tokens"]
            totals["total_s"] += line["perf/step_s"]
        elif line["kind"] == "eval":
            figures = {name: line[f"eval/test/{name}"] for name in FIGURES if f"eval/test/{name}" in line}
            points.append({"step": line["step"], **totals, **figures})
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model to fine-tune")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--gpus", nargs="+", default=["0"], help="indices of the GPUs that the runs share")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of reinforcement learning")
    parser.add_argument("--seed", type=int, default=0, help="seed of the world and of fine-tuning")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--train", type=int, default=4000, help="training questions")
    parser.add_argument("--test", type=int, default=200, help="held-out questions")
    parser.add_argument("--max-hops", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=2000, help="of the expert, for fine-tuning")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sft-rate", type=float, default=3e-4)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/tool_agent_benchmark"))
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(arguments, folder)
    curves = {name: read_curve(run) for name, run in train_all(arguments, folder).items()}
    print(
        f"{'method':16}{'step':>6}{'EM':>8}{'F1':>8}{'calls':>8}{'format':>8}{'total calls':>13}{'tokens':>11}{'s':>8}"
    )
    for name, curve in curves.items():
        for point in (curve[0], curve[-1]):
            print(
                f"{name:16}{point['step']:>6}{point['em']:>8.3f}{point['f1']:>8.3f}{point['tool_calls']:>8.2f}"
                f"{point['format']:>8.3f}{point['total_tool_calls']:>13.0f}{point['total_sampled_tokens']:>11.0f}"
                f"{point['total_s']:>8.0f}"
            )
    last = {name: curve[-1]["em"] for name, curve in curves.items()}
    publish(
        name="tool_agent",
        unit="exact match on held-out questions after the last evaluation",
        ours=max(last.values()),
        peers={},
        device=arguments.device,
        details={"curves": curves, "arguments": {**vars(arguments), "folder": "", "out": ""}},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
