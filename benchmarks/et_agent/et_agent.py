"""The orderings of ET-Agent's paper on the pocket model: recipes/et_agent/pocket.yaml with baselines, several seeds.

Each seed runs the recipe up to the fine-tuned model (`shared`, `flywheel`, `rft`) and from there several arms, each in
a process of its own: the recipe's reinforcement learning (`rl`) and the same with a reward of correctness alone, with
random questions, with a constant sigma, and from the prompted model. `rft_rollouts` is fine-tuned on plain rollouts
that sampled as many tokens as the flywheel, with as many updates. Every model answers the same test questions.

    python -m benchmarks.et_agent.et_agent --seeds 0 1 2 3 4 --jobs 16 --minutes 13 --out results/et_agent/pocket.json
    python -m benchmarks.et_agent.et_agent --table results/et_agent/pocket.json    # the tables again, and the figure

The same command resumes after a kill or after `--minutes`. Results of what is complete are always written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.et_agent.jobs import ARMS, EVALUATION, ROOT, Job, Plan, read_done
from benchmarks.et_agent.orderings import (
    build_radar,
    format_models,
    format_orderings,
    judge_orderings,
    summarize_models,
)
from benchmarks.shared.report import publish
from tunesmith.commands.eval.comparison import can_plot
from tunesmith.et_agent.radar import save_radar_plot
from tunesmith.et_agent.selection.rft import measure_diversity, measure_text_spreads, read_trajectories

PIPELINE, DONE, LOG = "pipeline.yaml", "job.done", "job.log"
FROM_EVALUATION = {
    "accuracy": "em",
    "efficiency": "efficiency",
    "successful_execution": "successful_execution",
    "reasoning_length": "reasoning_length",
}
DATA = {"data_flywheel": ("flywheel", "rft_filter"), "data_rollouts": ("rft_rollouts", "rollouts_filter")}
"""Label -> job and stage of the filter whose kept trajectories are compared."""
ENDED = {"done", "failed"}
PATIENCE_S = 5.0
"""Seconds that interrupted jobs have to save their state."""


def run_jobs(
    jobs: dict[str, Job], folder: Path, *, num_processes: int, until: float, on_done: Callable[[dict[str, str]], None]
) -> dict[str, str]:
    """Run the jobs in processes, each after those that it needs; returns the state of each. `on_done` is called with
    the states so far when a job is done."""
    states = dict.fromkeys(jobs, "waiting")
    running: dict[str, subprocess.Popen[bytes]] = {}
    while any(state not in ENDED for state in states.values()):
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            states[name] = "failed" if process.returncode else "done"
            if process.returncode:
                print(f"{name} failed:\n{(folder / name / LOG).read_text(errors='replace')[-2000:]}", flush=True)
            else:
                (folder / name / DONE).write_text(digest(folder / name / PIPELINE), encoding="utf-8")
                print(f"{time.strftime('%H:%M:%S')} {name} done", flush=True)
                on_done(states)
        for name, job in jobs.items():
            if states[name] == "waiting" and any(states[each] == "failed" for each in job.needs):
                states[name] = "failed"
            is_ready = states[name] == "waiting" and all(states[each] == "done" for each in job.needs)
            if is_ready and len(running) < num_processes:
                process_or_none = start(job, folder / name)
                states[name] = "done" if process_or_none is None else "running"
                if process_or_none is not None:
                    running[name] = process_or_none
        if time.monotonic() > until:
            break
        if running:
            time.sleep(0.2)
    for process in running.values():
        process.terminate()
    for process in running.values():
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # stages resume after a kill, too
    return states


def start(job: Job, folder: Path) -> subprocess.Popen[bytes] | None:
    """Start the pipeline of a job; None if it is complete already."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "job.yaml"
    settings.write_text(yaml.safe_dump(job.build(), sort_keys=False), encoding="utf-8")
    done = folder / DONE
    if done.exists() and (folder / PIPELINE).exists() and done.read_text() == digest(settings):
        return None
    done.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tunesmith", "run", str(settings)], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def read_model(folder: Path, label: str) -> dict[str, list[float | None]]:
    """The quantities of an evaluated model, one number for each question."""
    comparison = json.loads((folder / "eval" / "comparison.json").read_text(encoding="utf-8"))
    tasks = comparison["test"]["models"][label]["tasks"]
    values: defaultdict[str, list[float | None]] = defaultdict(list)
    for task in tasks:
        scored = [each for each in task["attempts"] if each["reward"] is not None]
        for quantity, name in FROM_EVALUATION.items():
            values[quantity].append(average([each["metrics"][name] for each in scored if name in each["metrics"]]))
        values["tool_calls"].append(average([each["tool_calls"] for each in scored]))
        spread, _ = measure_text_spreads([[each["response"] for each in scored]], None)
        values["spread"].append(None if spread is None else round(spread, 4))
    return dict(values)


def average(values: list[float]) -> float | None:
    return round(fmean(values), 4) if values else None


@cache
def read_data(plan: Plan) -> dict[str, dict[str, list[float | None]]]:
    """The spread of the trajectories of each training question that RFT trains, with and without the flywheel."""
    spreads: dict[str, dict[str, float | None]] = {}
    for label, (job, stage) in DATA.items():
        path = plan.job_folder(job) / stage / "transcripts.jsonl"
        if not path.exists():
            return {}
        grouped = defaultdict(list)
        for row in read_trajectories(str(path)):
            grouped[str(row.question_id)].append(row)
        spreads[label] = {name: measure_diversity(rows)["lexical_spread_in_question"] for name, rows in grouped.items()}
    names = sorted(set(spreads["data_flywheel"]) | set(spreads["data_rollouts"]))
    # a question with one trajectory or none has no spread: the data does not vary there
    return {label: {"spread": [found.get(name) or 0.0 for name in names]} for label, found in spreads.items()}


def collect(plan: Plan, states: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of each question by model, and seconds and figures of each stage by job."""
    questions: dict[str, Any] = {}
    stages: dict[str, Any] = {}
    for job in plan.list_jobs():
        if states[job.name] != "done":
            continue
        label = job.name.partition("/")[2]
        folder = plan.job_folder(label)
        names = [path.parent.name for path in (folder / "stages").glob("*/DONE.json")]
        records = {name: read_done(folder, name) for name in names}
        stages[label] = {
            name: {key: record[key] for key in ("seconds", "tokens", "figures", "num_attempts")}
            for name, record in sorted(records.items(), key=lambda each: each[1]["ended"])
            if name != "eval"
        }
        if "eval" in records:
            stages[label]["eval"] = {key: records["eval"][key] for key in ("seconds", "tokens", "num_attempts")}
            model = label.removesuffix(EVALUATION)
            questions[model] = read_model(folder, model)
    if questions.keys() >= {"rft", "rft_rollouts"}:
        questions |= read_data(plan)
    return questions, stages


def build_results(plans: list[Plan], states: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """What is known of the jobs that are done."""
    found = {str(plan.seed): collect(plan, states) for plan in plans}
    return {
        "unfinished": [name for name, state in states.items() if state != "done"],
        "stages": {seed: each for seed, (_, each) in found.items()},
        "questions": {seed: each for seed, (each, _) in found.items()},
        "arguments": {**vars(arguments), "folder": "", "table": None, "out": None},
    }


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """The results with the estimates of all models and the orderings, which follow from the values of questions."""
    questions = results["questions"]
    return {**results, "models": summarize_models(questions), "orderings": judge_orderings(questions)}


def save_unfinished(results: dict[str, Any], out: str) -> None:
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"details": results}), encoding="utf-8")


def show(results: dict[str, Any], plot: Path) -> None:
    """Print the tables, and draw the chart where matplotlib is installed."""
    print(format_models(results["models"]), "\n")
    print(format_orderings(results["orderings"]), "\n")
    if can_plot():
        shown = {label: each for label, each in results["models"].items() if label in MODELS_IN_CHART}
        save_radar_plot(plot, build_radar(shown))


MODELS_IN_CHART = ("prompted", "rft_rollouts", "rft", "rl_correctness", "rl_random", "rl")


def parse_overrides(texts: list[str]) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS), help="none: up to RFT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once, of one thread each")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time; a later call resumes")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/et_agent_benchmark"))
    parser.add_argument("--num-samples", type=int, default=4, help="rollouts of each test question")
    parser.add_argument(
        "--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE", help="keys of the recipe"
    )
    parser.add_argument("--table", type=Path, help="print the tables of a result file, draw the figure, and end")
    parser.add_argument("--out", default="results/et_agent/pocket.json", help="JSON file for the result")
    arguments = parser.parse_args()
    if arguments.table is not None:
        details = json.loads(arguments.table.read_text(encoding="utf-8"))["details"]
        show(summarize(details), arguments.table.with_suffix(".png"))
        return
    until = time.monotonic() + 60 * arguments.minutes
    plans = [
        Plan(
            folder=arguments.folder.absolute(),
            seed=seed,
            arms=arguments.arms,
            overrides=parse_overrides(arguments.overrides),
            num_samples=arguments.num_samples,
        )
        for seed in arguments.seeds
    ]
    of_seeds = [plan.list_jobs() for plan in plans]
    jobs = {job.name: job for same_place in zip(*of_seeds, strict=True) for job in same_place}
    states = run_jobs(
        jobs,
        arguments.folder.absolute(),
        num_processes=arguments.jobs,
        until=until,
        on_done=lambda found: save_unfinished(build_results(plans, found, arguments), arguments.out),
    )
    results = summarize(build_results(plans, states, arguments))
    show(results, Path(arguments.out).with_suffix(".png"))
    accuracy = {label: each["accuracy"][0] for label, each in results["models"].items() if "accuracy" in each}
    last = next((label for label in ("rl", "rft", "prompted") if label in accuracy), None)
    if last is None:
        sys.exit(f"no phase has been evaluated; unfinished: {', '.join(results['unfinished'])}")
    publish(
        name="et_agent_pocket",
        unit=f"accuracy on test questions of {last}; peers are the other phases and baselines",
        ours=accuracy.pop(last),
        peers=accuracy,
        device="cpu",
        details=results,
        out=arguments.out,
    )
    if results["unfinished"]:
        sys.exit(f"unfinished: {', '.join(results['unfinished'])}")


if __name__ == "__main__":
    main()
