"""GRPOTrainer of TRL with vLLM on the tasks of `recipes/function_calling`: same tasks, reward and reader of calls.

Prompts are rendered here by the model's own template with the tools of each row; a reply is paid by the reader of calls
and the checker that Tunesmith uses, and questions that no function answers as there. The loss is TRL's `dapo` (a mean
over the tokens of the batch) with advantages scaled by the group, as in the recipe; rate, warm-up, clip, batch and
group are equal too. TRL pads all prompts of a step to the longest, so training tasks with longer prompts than
`--max-prompt` are left out, for both. A step's seconds include sampling, rewards and the update. Checkpoints are saved
outside of the clock and are evaluated by `tunesmith eval`; the arms `short-SEED` are Tunesmith's side.

    python -m benchmarks.learning.function_calling_trl train --model PATH --data BFCL --folder trl/42 --limit-s 900
    python -m benchmarks.learning.function_calling_arms --work WORK --out OUT --arms short-42 short-1 short-2
    python -m benchmarks.learning.function_calling_trl curves KEPT --trl trl --out OUT.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.learning.function_calling import judge
from benchmarks.shared.peer_trl import PLAIN, prepare_vllm
from benchmarks.shared.report import publish, read_text
from recipes.function_calling.conversations import load_tasks
from tunesmith.environments.sets.bfcl import Row, find_data
from tunesmith.types import Task

VALIDATION = 15
"""Places of the validation split, as in `run.yaml`."""
SPLITS = ("validation", "test")


def render(row: Row, tokenizer: Any) -> str:
    return tokenizer.apply_chat_template(
        row.line["question"][0], tools=row.schemas, add_generation_prompt=True, tokenize=False
    )


def keep_short(
    tasks: Sequence[Task], *, model: str, max_prompt: int, path: str | None = None
) -> tuple[list[Task], dict[str, float]]:
    """An operator of the training set: the tasks whose prompt is at most `max_prompt` tokens."""
    from transformers import AutoTokenizer

    tokenizer, rows = AutoTokenizer.from_pretrained(model), load_tasks(find_data(path))
    kept = [each for each in tasks if len(tokenizer(render(rows[each.row["id"]], tokenizer)).input_ids) <= max_prompt]
    return kept, {"num_kept": float(len(kept))}


def load_prompts(data: str | None, tokenizer: Any, *, max_prompt: int, seed: int) -> tuple[dict[str, Row], Any]:
    """The rows by id, and a shuffled data set of the training rows whose prompt is at most `max_prompt` tokens."""
    from datasets import Dataset

    rows = load_tasks(find_data(data))
    names = sorted(name for name, row in rows.items() if row.find_split(VALIDATION) == "train")
    random.Random(seed).shuffle(names)
    prompts = [(name, render(rows[name], tokenizer)) for name in names]
    kept = [(name, text) for name, text in prompts if len(tokenizer(text).input_ids) <= max_prompt]
    print(f"{len(kept)} of {len(names)} prompts have at most {max_prompt} tokens")
    return rows, Dataset.from_dict({"prompt": [text for _, text in kept], "name": [name for name, _ in kept]})


def build_saver(folder: Path, steps: int, limit_s: float, seconds: list[float]) -> Any:
    """A callback that times steps, saves the weights every `steps` steps outside of the time, and ends at the limit."""
    import torch
    from transformers import TrainerCallback

    class Saver(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: object, state: Any, control: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.started)
            control.should_training_stop |= sum(seconds) >= limit_s
            if state.global_step % steps == 0 or control.should_training_stop:
                path = folder / f"step_{state.global_step:06d}"
                kwargs["model"].save_pretrained(path)
                kwargs["processing_class"].save_pretrained(path)

        def on_log(self, _: object, state: Any, __: object, logs: Mapping[str, Any], **___: object) -> None:
            line = {"step": state.global_step, "seconds": seconds[-1] if seconds else None} | dict(logs)
            with (folder / "log.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    return Saver()


def train(arguments: argparse.Namespace) -> None:
    arguments.folder.mkdir(parents=True, exist_ok=True)
    vllm = prepare_vllm(arguments.gpu_memory) if arguments.gpu_memory else {}
    if vllm:
        vllm["vllm_max_model_length"] = arguments.max_prompt + arguments.max_tokens
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows, dataset = load_prompts(arguments.data, tokenizer, max_prompt=arguments.max_prompt, seed=arguments.seed)
    seconds: list[float] = []
    has_gpu = torch.cuda.is_available()
    plain = PLAIN | {"lr_scheduler_type": "constant_with_warmup"}
    config = GRPOConfig(
        output_dir=str(arguments.folder / "trainer"),
        use_cpu=not has_gpu,
        bf16=has_gpu,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.tasks * arguments.group // arguments.micro_batch,
        num_generations=arguments.group,
        max_completion_length=arguments.max_tokens,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        warmup_steps=5,
        loss_type="dapo",
        seed=arguments.seed,
        **plain,
        **vllm,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32"),  # bf16 autocast on a GPU
        processing_class=tokenizer,
        reward_funcs=lambda completions, name, **_: [
            float(judge(text, 0, 0.0, rows[each]).is_right) for text, each in zip(completions, name, strict=True)
        ],
        args=config,
        train_dataset=dataset,
        callbacks=[build_saver(arguments.folder, arguments.save, arguments.limit_s, seconds)],
    )
    trainer.train()
    print(json.dumps({"steps": len(seconds), "seconds": sum(seconds), "median_s": sorted(seconds)[len(seconds) // 2]}))


Point = dict[str, float]
"""Of a curve: step, seconds (and rollouts, where known) of the steps so far, and the accuracy of each split."""


def read_own(folder: Path) -> list[Point]:
    """The curve of an arm, from its metrics."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points, seconds, rollouts = list[Point](), 0.0, 0.0
    for row in rows:
        seconds += row.get("perf/step_s", 0.0)
        rollouts += row.get("rollout/num_trajectories", 0.0)
        found = {split: row[f"eval/{split}/reward"] for split in SPLITS if f"eval/{split}/reward" in row}
        if found:
            points.append({"step": row["step"], "seconds": seconds, "rollouts": rollouts} | found)
    return points


def read_trl(folder: Path) -> list[Point]:
    """The curve of a run of TRL, from its log and the comparison of its checkpoints, `step_NNNNNN` by name."""
    logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["seconds"] for row in logged if "reward" in row}
    comparison = json.loads(read_text(folder / "comparison.json") or "{}")
    points = list[Point]()
    for name in sorted(comparison[SPLITS[0]]["models"]):
        if name.startswith("step_"):
            step = int(name.removeprefix("step_"))
            means = {split: comparison[split]["models"][name]["estimates"]["reward"]["mean"] for split in SPLITS}
            points.append({"step": step, "seconds": sum(seconds[each] for each in range(1, step + 1))} | means)
    return points


def find_first(points: Sequence[Point], split: str, accuracy: float, *, what: str = "seconds") -> float | None:
    """The seconds or rollouts at the first point that reaches the accuracy."""
    return next((each[what] for each in points if each[split] >= accuracy), None)


def compare(arguments: argparse.Namespace) -> None:
    curves: dict[str, list[Point]] = {}
    for folder in sorted(arguments.kept.glob("short-*")):
        curves[f"tunesmith {folder.name.removeprefix('short-')}"] = read_own(folder)
    for folder in sorted(arguments.trl.iterdir()):
        curves[f"trl {folder.name}"] = read_trl(folder)
    start = next(points[0] for points in curves.values() if not points[0]["step"])  # all begin with the same weights
    curves = {name: points if not points[0]["step"] else [start, *points] for name, points in curves.items()}
    for name, points in curves.items():
        for each in points:
            minutes = each["seconds"] / 60 / arguments.share
            accuracies = "   ".join(f"{split} {each[split]:.3f}" for split in SPLITS)
            print(f"{name:14} step {each['step']:4.0f} {minutes:6.2f} GPU minutes   {accuracies}")
    reached: dict[str, dict[str, float | None]] = {}
    for goal in arguments.goals:
        seconds = {name: find_first(points, SPLITS[0], goal) for name, points in curves.items()}
        reached[f"{goal:g}"] = minutes = {
            name: value if value is None else round(value / 60 / arguments.share, 3) for name, value in seconds.items()
        }
        print(f"GPU minutes to {goal:.0%} on the validation tasks:", json.dumps(minutes))
    first = reached[f"{arguments.goals[0]:g}"]
    means = {
        system: fmean(found)
        for system in ("tunesmith", "trl")
        if (found := [value for name, value in first.items() if name.startswith(system) and value is not None])
    }
    publish(
        name="function_calling_trl", unit=f"GPU minutes to {arguments.goals[0]:.0%} of the validation tasks",
        ours=means.pop("tunesmith"), peers=means, device="cpu",
        details={"curves": curves, "share": arguments.share, "gpu_minutes_to": reached}, out=arguments.out,
    )  # fmt: skip
    if arguments.plot:
        draw(curves, arguments.share, arguments.plot)


def draw(curves: Mapping[str, Sequence[Point]], share: float, out: Path) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"font.size": 10, "svg.hashsalt": "tunesmith", "axes.spines.top": False})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharex=True)
    for split, panel in zip(SPLITS, axes, strict=True):
        for name, points in curves.items():
            minutes = [each["seconds"] / 60 / share for each in points]
            system = name.split()[0]
            panel.plot(
                minutes, [100 * each[split] for each in points], marker="o", markersize=3,
                color={"tunesmith": "C0", "trl": "C1"}[system], alpha=0.8, label=name,
            )  # fmt: skip
        panel.set(title=f"{split} tasks", xlabel="GPU minutes in steps", ylabel="right, %")
        panel.spines["right"].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train with TRL")
    training.set_defaults(run=train)
    training.add_argument("--model", required=True, help="folder of the model and its tokenizer")
    training.add_argument("--data", help="folder of bfcl-eval's data; the installed package's without it")
    training.add_argument("--folder", type=Path, required=True, help="folder of checkpoints and the log")
    training.add_argument("--steps", type=int, default=100)
    training.add_argument("--save", type=int, default=10, help="save the weights every so many steps")
    training.add_argument("--limit-s", type=float, default=1e9, help="seconds in steps after which the run ends")
    training.add_argument("--tasks", type=int, default=96)
    training.add_argument("--group", type=int, default=8)
    training.add_argument("--micro-batch", type=int, default=8, help="rollouts of a forward and backward")
    training.add_argument("--max-prompt", type=int, default=1024, help="longer prompts are left out")
    training.add_argument("--max-tokens", type=int, default=320)
    training.add_argument("--learning-rate", type=float, default=3e-6)
    training.add_argument("--gpu-memory", type=float, default=0.3, help="share of vLLM; 0 samples with generate")
    training.add_argument("--seed", type=int, default=42)
    comparing = commands.add_parser("curves", help="accuracy by GPU minutes of both")
    comparing.set_defaults(run=compare)
    comparing.add_argument("kept", type=Path, help="folder of the arms, as function_calling_arms keeps them")
    comparing.add_argument("--trl", type=Path, required=True, help="a folder for each seed: log.jsonl, comparison.json")
    comparing.add_argument("--share", type=float, default=1.0, help="runs that shared the GPU, of either side")
    comparing.add_argument("--goals", type=float, nargs="+", default=[0.65, 0.6], help="accuracies to be reached")
    comparing.add_argument("--plot", type=Path, help="SVG file of the curves")
    comparing.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
