"""The pictures of README.md, drawn from recorded runs.

    python -m benchmarks.learning.plot_readme curves --demo results/runs/demo_metrics \\
        --gsm8k results/runs/gsm8k_grpo_gpu --out docs/images
    python -m benchmarks.learning.plot_readme record --rollouts RUN/rollouts/step_000040.parquet \\
        --model RUN/global_step_40 --task train/7 --out results/runs/demo_rollout.json
    python -m benchmarks.learning.plot_readme rollout --trajectory results/runs/demo_rollout.json --out docs/images

`curves` draws the accuracy of the demo's rollouts by step and that of SmolLM2 on GSM8K; `record` writes one trajectory,
token by token, from the Parquet file of a step; `rollout` draws it, sampled tokens coloured by their probability.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

WIDTH = 96
"""Characters per line of the rollout."""
GREY, DARK = "#6b7280", "#111827"
GSM8K_MODELS = ("base", "sft", "grpo")
FONT_SIZE = 8.5
CHARACTER_WIDTH = 0.602 * FONT_SIZE / 72
"""Of DejaVu Sans Mono, in inches."""
SHADES = ((0.9, (0.75, 0.9, 0.8)), (0.5, (1.0, 0.9, 0.6)), (0.0, (1.0, 0.75, 0.6)))
"""Backgrounds of sampled tokens above a probability."""


def load_accuracy(path: Path) -> tuple[list[int], list[float]]:
    """Steps, and the mean accuracy of the rollouts of each, in per cent."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    return [row["step"] for row in rows], [100 * row["rollout/accuracy/mean"] for row in rows]


def smooth(values: list[float], width: int = 5) -> list[float]:
    """The mean of each value and the `width` - 1 before it."""
    return [statistics.fmean(values[max(0, index - width + 1) : index + 1]) for index in range(len(values))]


def plot_curve(axes: Axes, steps: list[int], values: list[float], colour: str, label: str) -> None:
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values), color=colour, linewidth=2, label=label)


def draw_curves(demo: Path, gsm8k: Path, out: Path) -> None:
    mpl.rcParams.update({"font.size": 10, "svg.hashsalt": "tunesmith", "axes.spines.top": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for index, path in enumerate(sorted(demo.glob("seed*.jsonl"))):
        plot_curve(left, *load_accuracy(path), f"C{index}", path.stem.replace("seed", "seed "))
    left.set(title="tunesmith demo: 1.3M parameters, on a CPU", ylabel="accuracy of the rollouts, %", ylim=(0, 100))
    draw_test_accuracy(right, gsm8k / "comparison.json.gz")
    left.set_xlabel("GRPO step")
    left.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines["right"].set_visible(False)
    save(figure, out / "learning_curves.svg")


def draw_test_accuracy(axes: Axes, comparison: Path) -> None:
    """Accuracy on the test questions with 95 % intervals, one bar per model."""
    models = json.loads(gzip.decompress(comparison.read_bytes()))["test"]["models"]
    for index, name in enumerate(GSM8K_MODELS):
        accuracy = models[name]["estimates"]["accuracy"]
        mean, (low, high) = accuracy["mean"], accuracy["interval"]
        axes.bar(index, 100 * mean, 0.6, color=f"C{index}")
        axes.errorbar(index, 100 * mean, [[100 * (mean - low)], [100 * (high - mean)]], color=DARK, capsize=4)
    axes.set_xticks(range(len(GSM8K_MODELS)), ["as it comes", "96 s of SFT", "192 s of GRPO"])
    axes.set(title="GSM8K: SmolLM2-135M, calculator, one H200", ylabel="accuracy on the test set, %")


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(path)


def record_trajectory(rollouts: Path, model: str, task: str, out: Path) -> None:
    """Write the tokens of the task's first rollout: text, probability where sampled, and what came of it."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    row = next(row for row in pq.read_table(rollouts).to_pylist() if row["task_id"] == task)
    tokens: list[dict[str, Any]] = []
    num_known = 0
    for turn in row["turns"]:
        prompt, sampled = turn["prompt_ids"], turn["sampled_ids"]
        tokens += [{"text": tokenizer.decode([token]), "probability": None} for token in prompt[num_known:]]
        tokens += [
            {"text": tokenizer.decode([token]), "probability": round(math.exp(logprob), 4)}
            for token, logprob in zip(sampled, turn["logprobs"], strict=True)
        ]
        num_known = len(prompt) + len(sampled)
    record = {"task": json.loads(row["task_row"]), "reward": row["reward"], "step": row["step"], "tokens": tokens}
    out.write_text(json.dumps(record, indent=1) + "\n")


def draw_rollout(trajectory: Path, out: Path) -> None:
    """Draw each token in a line of text; sampled tokens have a background, darker where the token was less likely."""
    record = json.loads(trajectory.read_text())
    lines: list[list[tuple[str, float | None]]] = [[]]
    for token in record["tokens"]:
        for index, piece in enumerate(token["text"].split("\n")):
            if index > 0:
                lines.append([])
            for start in range(0, len(piece), WIDTH):
                part = piece[start : start + WIDTH]
                if sum(len(text) for text, _ in lines[-1]) + len(part) > WIDTH:
                    lines.append([])
                lines[-1].append((part, token["probability"]))
    lines = [line for line in lines if line]
    height = 0.2 * len(lines) + 0.75
    figure = plt.figure(figsize=((WIDTH + 2) * CHARACTER_WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, WIDTH + 1), ylim=(len(lines) + 2.6, -1.2))
    axes.axis("off")
    font = {"family": "DejaVu Sans Mono", "size": FONT_SIZE, "va": "center", "ha": "left"}
    for number, line in enumerate(lines):
        column = 0
        for text, probability in line:
            if probability is not None:
                shade = next(shade for least, shade in SHADES if probability >= least)
                axes.add_patch(plt.Rectangle((column, number - 0.42), len(text) - 0.06, 0.84, color=shade, linewidth=0))
            axes.text(column, number, text, color=GREY if probability is None else DARK, **font)
            column += len(text)
    num_sampled = sum(token["probability"] is not None for token in record["tokens"])
    axes.text(
        0,
        len(lines) + 1,
        f"step {record['step']}, reward {record['reward']:g}. Grey: prompt and tool result. Coloured: the "
        f"{num_sampled} sampled tokens,\nthe only ones trained; green above 90 % probability, yellow above 50 %, red "
        "below.",
        color=DARK,
        size=FONT_SIZE,
        va="center",
        ha="left",
    )
    save(figure, out / "rollout.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    curves = commands.add_parser("curves", help="draw learning_curves.svg")
    curves.add_argument("--demo", type=Path, required=True, help="folder with the metrics of demo runs, seed*.jsonl")
    curves.add_argument("--gsm8k", type=Path, required=True, help="folder with metrics_grpo.jsonl")
    curves.add_argument("--out", type=Path, required=True, help="folder of the picture")
    record = commands.add_parser("record", help="write one trajectory as JSON")
    record.add_argument("--rollouts", type=Path, required=True, help="Parquet file of a step")
    record.add_argument("--model", required=True, help="folder with the tokenizer")
    record.add_argument("--task", required=True, help="task_id of the rollout")
    record.add_argument("--out", type=Path, required=True, help="JSON file")
    rollout = commands.add_parser("rollout", help="draw rollout.svg")
    rollout.add_argument("--trajectory", type=Path, required=True, help="JSON file of `record`")
    rollout.add_argument("--out", type=Path, required=True, help="folder of the picture")
    arguments = parser.parse_args()
    if arguments.command == "curves":
        draw_curves(arguments.demo, arguments.gsm8k, arguments.out)
    elif arguments.command == "record":
        record_trajectory(arguments.rollouts, arguments.model, arguments.task, arguments.out)
    else:
        draw_rollout(arguments.trajectory, arguments.out)


if __name__ == "__main__":
    main()
