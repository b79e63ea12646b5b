"""Tokens per second of supervised fine-tuning with Tunesmith and TRL, and the difference of their loss curves.

Both train the same model, or the same new adapter on it, on the same tokens in the same batches and order, with the
same learning rate and AdamW. Tunesmith runs as users run it: a file of conversations and `run_offline`. Tokens are
those of the rows, prompts included and padding excluded, over the seconds of all steps after the warm-up.

    python -m benchmarks.training.sft --device cpu --mode lora --model models/smollm2-135m-instruct \\
        --questions gsm8k/train.jsonl
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.report import publish
from benchmarks.training.peer_trl_sft import PeerRun, run_trl_sft
from tunesmith.commands.sft.plan import OfflinePlan, build_plan
from tunesmith.commands.sft.train import run_offline
from tunesmith.config import SftConfig
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.load import load_section_model, load_section_tokenizer
from tunesmith.runs.load_config import build_section
from tunesmith.storage import load_json_lines

LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Speed and losses of a run."""

    seconds_per_step: list[float]
    """Seconds of the measured steps."""
    tokens_per_s: float
    losses: list[float]
    """Losses of all steps."""


def write_rows(arguments: argparse.Namespace, folder: Path) -> Path:
    """Write questions and worked answers as conversations."""
    count = arguments.rows_per_batch * (arguments.warmup + arguments.steps)
    rows = load_json_lines(Path(arguments.questions))[:count]
    assert len(rows) == count, f"{arguments.questions} has {len(rows)} rows, and {count} are needed"
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def build_settings(arguments: argparse.Namespace, rows: Path) -> SftConfig:
    """One epoch in the order of the file, `rows_per_batch` rows an update."""
    model: dict[str, Any] = {
        "path": arguments.model,
        "device": arguments.device,
        "max_model_len": arguments.max_model_len,
        "dtype": arguments.dtype,
    }
    if arguments.mode != "full":
        model["lora"] = {"quantization": "nf4" if arguments.mode == "qlora" else "none"}
    return build_section(
        SftConfig,
        {
            "model": model,
            "train_dataset": {"path": str(rows)},
            "has_shuffling": False,
            "max_rows_per_batch": arguments.rows_per_batch,
            "max_tokens_per_batch": 10**9,
            "save_interval_steps": 10**9,
            "monitor": {"trackers": [], "has_progress": arguments.device != "cpu"},
            "trainer": {
                "learning_rate": LEARNING_RATES[arguments.mode],
                "schedule": "constant",
                "warmup_ratio": 0,
                "max_tokens_per_row": arguments.max_tokens_per_row,
                **dict(pair.split("=", 1) for pair in arguments.trainer or []),
            },
        },
    )


def save_start(config: SftConfig, folder: Path) -> str | None:
    """The adapter that both begin with; None where whole weights train."""
    if config.model.lora is None:
        return None
    place = folder / "adapter"
    place.mkdir()
    save_model_files(place, load_section_model(config.model), load_section_tokenizer(config.model))
    return str(place)


def run_ours(arguments: argparse.Namespace, config: SftConfig, plan: OfflinePlan, folder: Path) -> Timing:
    run_offline(config, out_dir=folder / "ours")
    rows = load_json_lines(folder / "ours" / "metrics.jsonl")
    return measure(arguments, plan, [row["perf/train_s"] for row in rows], [row["train/loss"] for row in rows])


def run_peers(
    arguments: argparse.Namespace, config: SftConfig, plan: OfflinePlan, start: str | None
) -> dict[str, Timing]:
    """Run TRL with each requested micro-batch size, padded and optionally padding-free; on a GPU in both dtypes."""
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("this benchmark compares with TRL: pip install trl, or pass --without-peers")
    token_ids = [list(sample.token_ids) for sample in plan.samples]
    labels = [
        [token if is_sampled else -100 for token, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True)]
        for sample in plan.samples
    ]
    peers = {}
    is_narrow_too = arguments.device != "cpu" and arguments.mode != "qlora"
    for micro_batch in arguments.trl_micro_batch or [arguments.rows_per_batch]:
        ways = itertools.product(
            [False, True] if arguments.trl_padding_free else [False], [False, True] if is_narrow_too else [False]
        )
        for is_padding_free, has_narrow_weights in ways:
            run: PeerRun = run_trl_sft(
                model_path=arguments.model,
                adapter_path=start,
                is_quantized=arguments.mode == "qlora",
                token_ids=token_ids,
                labels=labels,
                rows_per_batch=arguments.rows_per_batch,
                micro_batch=micro_batch,
                is_padding_free=is_padding_free,
                has_narrow_weights=has_narrow_weights,
                learning_rate=config.trainer.learning_rate,
                device=arguments.device,
            )
            name = f"TRL, micro-batch {micro_batch}{', padding-free' if is_padding_free else ''}"
            name += ", bfloat16 weights" if has_narrow_weights else ""
            peers[name] = measure(arguments, plan, [float("nan"), *run.seconds_per_step], run.losses)
    return peers


def measure(arguments: argparse.Namespace, plan: OfflinePlan, seconds: list[float], losses: list[float]) -> Timing:
    """Tokens a second over the steps after the warm-up."""
    assert len(seconds) == len(losses) == len(plan.batches)
    lengths = [sum(len(sample.token_ids) for sample in batch) for batch in plan.batches]
    measured = seconds[arguments.warmup :]
    return Timing(
        seconds_per_step=measured,
        tokens_per_s=sum(lengths[arguments.warmup :]) / sum(measured),
        losses=losses,
    )


def compare_losses(ours: Timing, peers: dict[str, Timing]) -> dict[str, list[float]]:
    """Absolute difference of the loss of each step, by peer."""
    return {
        name: [abs(one - other) for one, other in zip(ours.losses, peer.losses, strict=True)]
        for name, peer in peers.items()
    }


def describe_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings, with file names instead of paths."""
    named = {key: Path(value).name for key, value in vars(arguments).items() if key in {"model", "questions"}}
    return {key: value for key, value in vars(arguments).items() if key != "out"} | named


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of all runs")
    parser.add_argument("--mode", default="lora", choices=["full", "lora", "qlora"], help="what is trained")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--questions", required=True, help="JSON lines file with question and answer")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="dtype of Tunesmith's weights"
    )
    parser.add_argument("--rows-per-batch", type=int, default=8, help="conversations per update")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the measured ones, at least 1")
    parser.add_argument("--max-model-len", type=int, default=1024, help="longest conversation in tokens")
    parser.add_argument("--max-tokens-per-row", type=int, default=16384, help="as trainer.max_tokens_per_row")
    parser.add_argument("--trainer", action="append", metavar="KEY=VALUE", help="other keys of the trainer section")
    parser.add_argument(
        "--trl-micro-batch", type=int, action="append", help="micro-batch of TRL; repeatable; default: the whole batch"
    )
    parser.add_argument("--trl-padding-free", action="store_true", help="also run TRL padding-free")
    parser.add_argument("--without-peers", action="store_true", help="do not run TRL")
    parser.add_argument("--out", help="JSON file for the result, results/training/NAME.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = build_settings(arguments, write_rows(arguments, folder))
        plan = build_plan(config)
        start = save_start(config, folder)
        ours = run_ours(arguments, config, plan, folder)
        peers = {} if arguments.without_peers else run_peers(arguments, config, plan, start)
    gaps = compare_losses(ours, peers)
    num_tokens = sum(len(sample.token_ids) for sample in plan.samples) / len(plan.batches)
    print(
        f"\n{arguments.mode}, {Path(arguments.model).name}, {arguments.steps} steps of {arguments.rows_per_batch} rows "
        f"and {num_tokens:.0f} tokens"
    )
    print(f"{'':<44}{'tokens/s':>10}{'step s':>9}{'first loss':>12}{'last loss':>11}{'loss gap':>11}")
    for name, each in {"tunesmith": ours, **peers}.items():
        gap = f"{max(gaps[name]):>11.1e}" if name in gaps else ""
        print(
            f"{name:<44}{each.tokens_per_s:>10.1f}{statistics.median(each.seconds_per_step):>9.2f}"
            f"{each.losses[0]:>12.5f}{each.losses[-1]:>11.5f}{gap}"
        )
    publish(
        name=f"sft_{arguments.mode}",
        unit="tokens a second",
        ours=ours.tokens_per_s,
        peers={name: peer.tokens_per_s for name, peer in peers.items()},
        device=arguments.device,
        details={
            "arguments": describe_arguments(arguments),
            "tokens_per_step": num_tokens,
            "ours": asdict(ours),
            "peers": {name: asdict(peer) for name, peer in peers.items()},
            "loss_gaps": gaps,
        },
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
