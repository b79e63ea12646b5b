"""Rollouts that continue while the weights change (`rollout.max_staleness`): speed with slow tools, and learning.

`speed` trains agents whose tools sleep (log-normal: median 1 s, 99th percentile 20 s) on a model with random weights,
with max_staleness 0, 1, 4 in one process, and prints trained tokens per second. A step with 0 waits for its slowest
agent. Sleeps are stratified: every 1024 of them have the quantiles of the distribution, shuffled.

`curve` trains an agent on the pocket model, on a CPU, with a calculator that sleeps, and prints held-out
accuracy over sampled tokens. Each seed and staleness is a process of its own, `--jobs` at a time.

    python -m benchmarks.training.staleness speed --device cuda
    python -m benchmarks.training.staleness curve --jobs 2 --out results/training/staleness_curve.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.demo_stages import finetune, resolve_stage
from benchmarks.shared.report import describe_environment, describe_settings, save_record
from benchmarks.shared.training_step import (
    RANDOM_WEIGHTS,
    TOTAL_STEPS,
    add_step_arguments,
    build_feed,
    build_parts,
    build_step_config,
    build_trainer,
    list_tasks,
    load_step_actors,
    save_model,
    time_step,
)
from benchmarks.training.slow_tools import Sleeps, use_tools
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.config import EvaluationSection, RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.judges.numeric import judge_number
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.policy import Policy
from tunesmith.tasks.arithmetic import Problem, build_problems, save_problems
from tunesmith.tools.calculator import CALCULATOR_TOOL, calculate
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import WorkflowOutput

MAX_FILLING_STEPS = 3
"""Steps that are not measured while groups in flight have no age yet; the first with older tokens compiles its loss."""
COUNTS = ("num_dropped_groups", "num_overtaking_groups", "num_mixed_turns")


SLEEPS = Sleeps(median_s=0.0, p99_s=0.0, seed=0)
"""Those of the current measurement."""


def measure_speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of each staleness; the first result is a warm-up without sleeps."""
    config = build_step_config(arguments, trainer=RANDOM_WEIGHTS)
    workflow = partial(use_tools, num_calls=arguments.calls, draw_sleep=lambda: SLEEPS.draw())
    policy, actors = load_step_actors(config, workflow=workflow)
    trainer = build_trainer(config, policy, num_steps=TOTAL_STEPS)

    async def run() -> list[dict[str, Any]]:
        global SLEEPS
        results = []
        for staleness in (None, *arguments.staleness):
            median_s = 0.0 if staleness is None else arguments.median_s
            SLEEPS = Sleeps(median_s=median_s, p99_s=arguments.p99_s, seed=1)
            steps = await run_steps(arguments, config, policy, actors, trainer, staleness=staleness)
            results.append({"staleness": staleness, "steps": steps})
        return results

    return run_lockstep(run(), config.rollout)


async def run_steps(
    arguments: argparse.Namespace,
    config: RunConfig,
    policy: Policy,
    actors: Actors,
    trainer: Trainer,
    *,
    staleness: int | None,
) -> list[dict[str, float]]:
    """Steps until `--seconds` have passed, after those that fill the groups in flight; `--warmup` for the warm-up."""
    feed = build_feed(list_tasks(64 * arguments.tasks))
    device = policy.model.device
    rollout = config.rollout.model_copy(update={"max_staleness": staleness or 0, "stale_cache": arguments.stale_cache})
    parts = build_parts(config.model_copy(update={"rollout": rollout}), feed, policy, actors, trainer)
    history: list[dict[str, float]] = []
    measured_s = 0.0
    while measured_s < arguments.seconds and not (staleness is None and len(history) == arguments.warmup):
        metrics = await time_step(parts, step=len(history) + 1, device=device.type)
        is_filling = len(history) < min((staleness or -1) + 1, MAX_FILLING_STEPS)
        measured_s += 0.0 if is_filling else metrics["seconds"]
        history.append(metrics | {"is_filling": float(is_filling)})
        print(f"staleness {staleness}, step {len(history)}: {metrics['seconds']:.2f} s", file=sys.stderr, flush=True)
    await parts.dispatcher.close()
    parts.trainer.thread.close()
    return history


def show_speed(results: list[dict[str, Any]]) -> None:
    print(f"\n{'max_staleness':>13}{'steps':>7}{'s/step':>9}{'train s':>9}{'tokens/s':>10}{'ratio':>7}", end="")
    print(f"{'mean lag':>10}{'stale':>8}{'dropped':>9}{'mixed turns':>13}")
    base = None
    for result in results[1:]:
        rows = [row for row in result["steps"] if not row["is_filling"]]
        seconds = sum(row["seconds"] for row in rows)
        rate = sum(row["train/num_trained_tokens"] for row in rows) / seconds
        base = base or rate
        dropped, _, mixed = (sum(row.get(f"staleness/{name}", 0.0) for row in rows) for name in COUNTS)
        trained = sum(row["algorithm/num_trained_groups"] for row in rows)
        lag = statistics.fmean(row.get("staleness/mean", 0.0) for row in rows)
        stale = statistics.fmean(row.get("staleness/stale_frac", 0.0) for row in rows)
        print(
            f"{result['staleness']:>13}{len(rows):>7}{seconds / len(rows):>9.2f}"
            f"{statistics.fmean(row['perf/train_s'] for row in rows):>9.2f}{rate:>10.0f}{rate / base:>7.2f}"
            f"{lag:>10.2f}{stale:>8.1%}{dropped / (dropped + trained):>9.1%}{mixed / len(rows):>13.0f}"
        )


def run_speed(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = save_model(arguments, Path(folder))
        results = measure_speed(arguments)
    out = arguments.out or f"results/training/staleness_{arguments.device}/{arguments.shape}.json"
    environment = describe_environment(arguments.device)
    save_record(out, {"arguments": describe_settings(arguments), "environment": environment, "results": results})
    show_speed(results)
    print(f"raw: {out}")


SYSTEM_PROMPT = "Use the tool."
SHARE_WITHOUT_TOOL = {1: 0.75, 2: 0.35, 3: 0.1}
"""Number of operations -> fraction of the demonstrations that answer without the tool, as in `tunesmith demo`."""
MAX_CALLS = 3


async def solve_slowly(task: Mapping[str, Any], model: ChatModel) -> WorkflowOutput:
    """The agent of `curve`: a calculator that sleeps."""
    messages: list[dict[str, Any]] = build_messages(task["question"])
    text = ""
    for _ in range(MAX_CALLS):
        message = (await model(messages, tools=[CALCULATOR_TOOL])).choices[0].message
        text = message.content or ""
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            break
        await asyncio.sleep(SLEEPS.draw())
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": answer_call(call.function.arguments)}
            for call in message.tool_calls
            if call.type == "function"
        ]
    return WorkflowOutput(response=text)


def answer_call(arguments: str) -> str:
    try:
        return calculate(json.loads(arguments)["expression"])
    except (ValueError, TypeError, KeyError):
        return "Error: the arguments cannot be read"


def build_messages(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def build_demonstrations(problems: Sequence[Problem], *, seed: int) -> list[dict[str, Any]]:
    """Rows for fine-tuning; the easier a problem, the more often it is answered without the tool."""
    rng = random.Random(f"demonstrations-{seed}")
    rows = []
    for problem in problems:
        messages = build_messages(problem.question)
        if rng.random() >= SHARE_WITHOUT_TOOL[problem.num_operations]:
            arguments = {"expression": problem.expression}
            call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": problem.answer},
            ]
        messages.append({"role": "assistant", "content": f"The answer is {problem.answer}."})
        rows.append({"messages": messages, "tools": [CALCULATOR_TOOL]})
    return rows


def run_worker(arguments: argparse.Namespace) -> None:
    """One run of `curve`: fine-tune unless the seed's model is there, train, write the curve."""
    global SLEEPS
    torch.set_num_threads(1)
    root = Path(arguments.folder)
    if arguments.worker == "finetune":
        save_problems(root / "data", num_train=4000, num_test=100, seed=arguments.seed)
        problems = build_problems("train", num_problems=arguments.demonstrations, seed=arguments.seed)
        finetune(root, build_demonstrations(problems, seed=arguments.seed), seed=arguments.seed)
        return
    SLEEPS = Sleeps(median_s=arguments.median_s, p99_s=arguments.p99_s, seed=arguments.seed)
    sizes = [f"seed={arguments.seed}", f"num_steps={arguments.steps}", "batch_size=16", "num_minibatches=1"]
    config: RunConfig = resolve_stage("rl", root, sizes)
    rollout = config.rollout.model_copy(update={"max_staleness": int(arguments.worker)})
    evaluation = EvaluationSection(interval_steps=arguments.interval, at_start=True)
    name = f"staleness-{arguments.worker}"
    place = {"checkpoint_root_dir": str(root), "project": "pocket", "name": name, "continue_from_checkpoint": True}
    config = config.model_copy(update={"rollout": rollout, "evaluation": evaluation, **place})
    started = time.perf_counter()
    result = run_tuning(
        config, workflow=solve_slowly, judge=judge_number, build_model=lambda e, o: ChatModel(e, options=o)
    )
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    curve = read_curve(rows) | {"seconds": time.perf_counter() - started}
    (root / f"{name}.json").write_text(json.dumps(curve))


def read_curve(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sampled tokens so far and held-out accuracy at each evaluation, and means over the steps."""
    tokens, points, steps = 0.0, [], [row for row in rows if row["kind"] == "train"]
    for row in rows:
        tokens += row.get("engine/num_sampled_tokens", 0.0) if row["kind"] == "train" else 0.0
        if row["kind"] == "eval":
            points.append({"step": row["step"], "sampled_tokens": tokens, "accuracy": row["eval/test/reward"]})
    means = {
        name: statistics.fmean(row.get(name, 0.0) for row in steps)
        for name in ("staleness/mean", "staleness/num_dropped_groups", "perf/step_s", "rollout/reward_mean")
    }
    return {"points": points, "means": means}


def run_curve(arguments: argparse.Namespace) -> None:
    seeds = range(arguments.seeds)
    kept = nullcontext(arguments.folder) if arguments.folder else tempfile.TemporaryDirectory()
    with kept as folder, ThreadPoolExecutor(arguments.jobs) as pool:

        def start(worker: str, seed: int) -> None:
            made = "finetuned" if worker == "finetune" else f"staleness-{worker}.json"
            if (Path(folder) / str(seed) / made).exists():
                return
            given = [
                "curve", "--worker", worker, "--folder", f"{folder}/{seed}", "--seed", str(seed),
                "--demonstrations", str(arguments.demonstrations), "--steps", str(arguments.steps),
                "--interval", str(arguments.interval),
                "--median-s", str(arguments.median_s), "--p99-s", str(arguments.p99_s),
            ]  # fmt: skip
            Path(folder).mkdir(exist_ok=True)
            with (Path(folder) / f"{worker}-{seed}.log").open("w") as log:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.training.staleness", *given], stdout=log, stderr=log, check=False
                )
            if done.returncode:
                raise SystemExit(Path(log.name).read_text())
            print(f"seed {seed}: {worker} is done", file=sys.stderr, flush=True)

        list(pool.map(partial(start, "finetune"), seeds))
        runs = [(str(staleness), seed) for seed in seeds for staleness in arguments.staleness]
        list(pool.map(lambda run: start(*run), runs))
        results = [
            {"staleness": int(staleness), "seed": seed}
            | json.loads((Path(folder) / str(seed) / f"staleness-{staleness}.json").read_text())
            for staleness, seed in runs
        ]
    out, settings = (
        arguments.out or "results/training/staleness_curve.json",
        describe_settings(arguments, hidden=("folder",)),
    )
    save_record(out, {"arguments": settings, "environment": describe_environment("cpu"), "results": results})
    show_curve(results)
    print(f"raw: {out}")


def show_curve(results: list[dict[str, Any]]) -> None:
    """Accuracy after each evaluation, mean over the seeds, with the tokens sampled until then."""
    steps = [point["step"] for point in results[0]["points"]]
    print(f"\n{'max_staleness':>13}{'mean lag':>10}{'dropped':>9}{'s/step':>8}", end="")
    print("".join(f"{f'step {step}':>18}" for step in steps))
    for staleness in sorted({result["staleness"] for result in results}):
        own = [result for result in results if result["staleness"] == staleness]
        means = {name: statistics.fmean(result["means"][name] for result in own) for name in own[0]["means"]}
        line = f"{staleness:>13}{means['staleness/mean']:>10.2f}{means['staleness/num_dropped_groups']:>9.2f}"
        line += f"{means['perf/step_s']:>8.2f}"
        for index in range(len(steps)):
            points = [result["points"][index] for result in own]
            accuracy = statistics.fmean(point["accuracy"] for point in points)
            tokens = statistics.fmean(point["sampled_tokens"] for point in points)
            line += f"{f'{accuracy:.1%} ({tokens / 1000:.0f}k)':>18}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    speed, curve = kinds.add_parser("speed"), kinds.add_parser("curve")
    for each, median_s, p99_s in ((speed, 1.0, 20.0), (curve, 0.1, 2.0)):
        each.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4], help="values of max_staleness")
        each.add_argument("--median-s", type=float, default=median_s, help="median of the sleeps")
        each.add_argument("--p99-s", type=float, default=p99_s, help="99th percentile of the sleeps")
        each.add_argument("--out", help="JSON file for the raw result, below results/ by default")
    add_step_arguments(speed)
    speed.set_defaults(shape="smollm2-135m", max_new_tokens=96)
    speed.add_argument("--tasks", type=int, default=64, help="tasks per step; tasks x group agents run at once")
    speed.add_argument("--calls", type=int, default=2, help="tool calls per rollout")
    speed.add_argument("--seconds", type=float, default=30.0, help="least time measured for each staleness")
    speed.add_argument("--warmup", type=int, default=2, help="steps without sleeps before: compilation, CUDA graphs")
    speed.add_argument("--stale-cache", default="recompute", choices=["recompute", "keep"], help="as in rollout")
    speed.set_defaults(run=run_speed)
    curve.add_argument("--seeds", type=int, default=3, help="number of seeds")
    curve.add_argument("--jobs", type=int, default=1, help="processes at a time")
    curve.add_argument("--demonstrations", type=int, default=1500, help="of the fine-tuning before")
    curve.add_argument("--steps", type=int, default=40, help="steps of a run")
    curve.add_argument("--interval", type=int, default=8, help="steps between evaluations")
    curve.add_argument("--worker", help=argparse.SUPPRESS)
    curve.add_argument("--folder", help="keeps the runs; started again, the command makes those that are missing")
    curve.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    curve.set_defaults(run=run_curve)
    arguments = parser.parse_args()
    if getattr(arguments, "worker", None) is not None:
        run_worker(arguments)
    else:
        arguments.run(arguments)


if __name__ == "__main__":
    main()
