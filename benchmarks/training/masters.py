"""How closely bfloat16 training with float32 master weights follows float32 training.

The same rows, batches and learning rate in float32; in bfloat16 as the trainer does it, with masters spread over the
rounding interval of each weight; and in bfloat16 with masters that start at the weights, where updates are rounded away
until they add up to half a bfloat16 step.

    python -m benchmarks.training.masters --model models/smollm2-135m-instruct --questions gsm8k/train.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from unittest import mock

import torch

from benchmarks.shared.report import publish
from benchmarks.training.sft import write_rows
from tunesmith.commands.sft.train import run_offline
from tunesmith.config import SftConfig
from tunesmith.runs.load_config import build_section
from tunesmith.storage import load_json_lines
from tunesmith.trainer import optimizer


def run(arguments: argparse.Namespace, *, dtype: str) -> list[float]:
    """The loss of each step."""
    with tempfile.TemporaryDirectory() as place:
        settings = {
            "model": {
                "path": arguments.model, "device": arguments.device, "dtype": dtype,
                "max_model_len": arguments.max_model_len,
            },
            "train_dataset": {"path": str(write_rows(arguments, Path(place)))},
            "has_shuffling": False,
            "max_rows_per_batch": arguments.rows_per_batch,
            "max_tokens_per_batch": 10**9,
            "save_interval_steps": 10**9,
            "monitor": {"trackers": []},
            "trainer": {
                "learning_rate": arguments.learning_rate, "schedule": "constant", "warmup_ratio": 0,
                "max_tokens_per_row": 4096,
            },
        }  # fmt: skip
        run_offline(build_section(SftConfig, settings), out_dir=Path(place) / "run")
        return [row["train/loss"] for row in load_json_lines(Path(place) / "run" / "metrics.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of all runs")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--questions", required=True, help="JSON lines file with question and answer")
    parser.add_argument("--rows-per-batch", type=int, default=8, help="conversations per update")
    parser.add_argument("--steps", type=int, default=12, help="updates")
    parser.add_argument("--max-model-len", type=int, default=1024, help="longest conversation in tokens")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="constant learning rate")
    parser.add_argument("--out", help="JSON file for the result, results/training/NAME.json")
    arguments = parser.parse_args()
    arguments.warmup = 0
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    losses = {"float32": run(arguments, dtype="float32"), "bfloat16, spread": run(arguments, dtype="bfloat16")}
    with mock.patch.object(optimizer, "_dither"):
        losses["bfloat16, centred"] = run(arguments, dtype="bfloat16")
    print(f"{'step':<6}" + "".join(f"{name:>20}" for name in losses))
    for step, row in enumerate(zip(*losses.values(), strict=True), start=1):
        print(f"{step:<6}" + "".join(f"{loss:>20.4f}" for loss in row))
    gaps = {
        name: statistics.fmean(abs(a - b) for a, b in zip(each, losses["float32"], strict=True))
        for name, each in losses.items()
    }
    print("mean distance from float32: " + ", ".join(f"{name} {gap:.4f}" for name, gap in gaps.items()))
    named = {key: Path(value).name for key, value in vars(arguments).items() if key in {"model", "questions"}}
    publish(
        name="masters",
        unit="1 / mean distance of the loss from float32 training",
        ours=1 / gaps["bfloat16, spread"],
        peers={"masters at the weights": 1 / gaps["bfloat16, centred"]},
        device=arguments.device,
        details={
            "arguments": {k: v for k, v in vars(arguments).items() if k not in ("out", "warmup")} | named,
            "losses": losses,
            "mean_distance": gaps,
        },
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
