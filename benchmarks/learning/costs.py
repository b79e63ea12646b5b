"""What the results of training cost: seconds, rollouts and tokens, from the files that the runs left in `results/`.

    python -m benchmarks.learning.costs

Prints the table of README.md. GPU minutes are those of the whole command, with its start, compiling and evaluations,
over the runs that the card had side by side. Where only the metrics of the steps were kept they are of the steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tunesmith.storage import load_json_lines

RUNS = Path("results/runs")


@dataclass(frozen=True)
class Result:
    """Runs of equal settings, `at_a_time` of them on one card."""

    name: str
    files: tuple[Path, ...]
    at_a_time: int = 1
    laps: tuple[str, str] | None = None
    """Lines of laps.txt at which the command begins and ends."""

    def read_seconds(self) -> float | None:
        """Of the whole command."""
        done = [each.with_name("done.json") for each in self.files]
        if all(each.is_file() for each in done):
            return fmean(json.loads(each.read_text())["seconds"] for each in done)
        if self.laps is None:
            return None
        lines = self.files[0].with_name("laps.txt").read_text().splitlines()
        ends = {name: float(seconds) for name, seconds in (each.removesuffix(" s").rsplit(" ", 1) for each in lines)}
        return ends[self.laps[1]] - ends[self.laps[0]]


RESULTS = (
    Result("function calls, 0.5B, 96 x 8", tuple(sorted(RUNS.glob("function_calling/rl-*/metrics.jsonl"))), 3),
    Result(
        "the same after fine-tuning, which is counted",
        tuple(sorted(RUNS.glob("function_calling/sft_rl-*/metrics.jsonl"))),
        5,
    ),
    Result("guessing a number, 0.5B, 64 x 8", tuple(sorted(RUNS.glob("text_game/guess-*/metrics.jsonl"))), 5),
    Result("GSM8K, 135M, fine-tuning", (RUNS / "gsm8k_grpo_gpu/metrics_sft.jsonl",), laps=("setup", "sft")),
    Result("GSM8K, 135M, GRPO, 32 x 16", (RUNS / "gsm8k_grpo_gpu/metrics_grpo.jsonl",), laps=("sft", "grpo")),
    Result("GSM8K, 135M, BOTS, 32 x 16, steps alone", (RUNS / "gsm8k_bots_gpu/metrics_bots.jsonl",)),
    Result("GSM8K, 135M, random order, 32 x 16, steps alone", (RUNS / "gsm8k_bots_gpu/metrics_random.jsonl",)),
)
HEADER = ("run", "steps", "GPU minutes", "seconds of steps", "rollouts", "tokens", "an H200-hour")


def main() -> None:
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for result in RESULTS:
        runs = [[row for row in load_json_lines(file) if row["kind"] == "train"] for file in result.files]

        def mean(key: str, runs: list[list[dict[str, float]]] = runs) -> float:
            return sum(row.get(key, 0.0) for run in runs for row in run) / len(runs)

        seconds = mean("perf/step_s") or mean("perf/train_s")
        sampled, trained = mean("rollout/num_sampled_tokens"), mean("train/num_tokens")
        minutes = (result.read_seconds() or seconds) / result.at_a_time / 60
        prompts = f"{mean('rollout/num_prompt_tokens') / 1e6:.1f} M in prompts"
        numbers = (
            f"{fmean(map(len, runs)):.0f}",
            f"{minutes:.1f}",
            f"{seconds:.0f}",
            f"{mean('rollout/num_trajectories'):,.0f}" if sampled else "-",
            f"{sampled / 1e6:.1f} M sampled, {prompts}" if sampled else f"{trained / 1e6:.1f} M trained",
            f"{60 / minutes:.0f} runs, {60 / minutes * (sampled or trained) / 1e6:.0f} M tokens",
        )
        side = f", {result.at_a_time} side by side" if result.at_a_time > 1 else ""
        print(f"| {result.name}{side} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
