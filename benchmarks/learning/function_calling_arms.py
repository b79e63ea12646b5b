"""Trains and evaluates the arms of the study of function calls, and of a game, several at a time on one GPU.

    MODEL=path/to/model python -m benchmarks.learning.function_calling_arms --work /tmp/arms --out results --jobs 3 \\
        --limit-s 900
    python -m benchmarks.learning.function_calling KEPT --out results/learning/function_calling.json

Each arm is one or two commands of `tunesmith` with the files of `recipes/function_calling` or `recipes/text_game`, in
a folder of its own. Arms start in the order of `ARMS`; finished ones are skipped, so that the script continues after a
limit. `arms.tar.gz` in the output folder is written anew after each arm, in pieces of 15 MB: logs, settings, metrics
and evaluations, for arms that the limit cut too. Checkpoints are deleted.

Arms from `rl` to `rl_none` train on all training tasks and are evaluated on the test tasks alone. `plain`, `varied`,
`steady`, `varied_steady`, `short` and the selectors train without the validation tasks and are evaluated on both, so
that settings and steps can be chosen without the test tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

RECIPE = Path("recipes/function_calling")
GAME = Path("recipes/text_game/run.yaml")
GUESS = GAME.with_name("guess.yaml")
SHUFFLE = "benchmarks.learning.shuffled_rewards:shuffle_rewards"
FORM = "recipes.function_calling.controls:pay_form"
REQUIRED = "recipes.function_calling.controls:play_required"
SHORT = "benchmarks.learning.function_calling_trl:keep_short"
VARY = "recipes.function_calling.variants:vary"
PLAY_VARIED = "recipes.function_calling.variants:play_varied"
PIECE = 15_000_000
KEPT = (
    "eval/step_*.json",
    "metrics.jsonl",
    "config.yaml",
    "comparison.json",
    "comparison.md",
    "train.jsonl",
    "log.txt",
)
SMALL = {
    "tune": ["total_steps=2", "algorithm.batch_size=2", "algorithm.group_size=2", "evaluation.interval_steps=0"],
    "sft": ["max_steps=2", "max_rows_per_batch=2"],
}
SMALL_SAMPLER = ["engine.kv_cache_gib=null", "engine.kv_cache_tokens=40000", "engine.max_num_seqs=4",
                 "environment.num_train=8", "environment.num_test=4", "model.max_tokens=16"]  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """Commands of `tunesmith`; `@arm` is the folder of the arm, `@kept` that of what is kept, `@model` the model."""

    commands: Sequence[Sequence[str]]
    needs: str | None = None
    rows: Sequence[str] = ()
    """A module and its arguments, which write the conversations to fine-tune on."""
    rollouts: Sequence[int] = ()
    """Steps whose rollouts are kept too, as `rollouts_STEP.parquet`."""


def evaluate_on(*splits: str) -> str:
    return f"eval_datasets={json.dumps({each: {'path': 'environment', 'split': each} for each in splits})}"


TEST = ["environment.args.validation=null", "eval_datasets={}", evaluate_on("test")]


def tune(*changes: str, seed: int, needs: str | None = None) -> Arm:
    return tune_file(RECIPE / "run.yaml", *TEST, *changes, seed=seed, needs=needs)


def tune_file(file: Path, *changes: str, seed: int, needs: str | None = None) -> Arm:
    given = [*changes, f"seed={seed}", "name=run", "checkpoint_root_dir=@arm"]
    return Arm([["tune", str(file), *(part for each in given for part in ("--set", each))]], needs)


def evaluate(model: str, *changes: str) -> list[str]:
    sets = [part for each in (*TEST, *changes) for part in ("--set", each)]
    return ["eval", str(RECIPE / "run.yaml"), "--model", f"model={model}", "--out", "@arm/eval", *sets]


def fine_tune(rows: str, *changes: str) -> Arm:
    sets = [part for each in changes for part in ("--set", each)]
    sft = ["sft", str(RECIPE / "sft.yaml"), "--out", "@arm/sft", *sets]
    return Arm([sft, evaluate("@arm/sft/model")], rows=write_rows(rows))


def write_rows(kind: str) -> list[str]:
    data = ["--data", os.environ["BFCL"]] if "BFCL" in os.environ else []
    return ["recipes.function_calling.conversations", kind, *data]


def fine_tune_then_tune(*, seed: int) -> Arm:
    """RL that begins with fine-tuning on the accepted answers."""
    (sft, _), (tuning,) = fine_tune("answers", f"seed={seed}", SFT_RATE).commands, tune(*AFTER_SFT, seed=seed).commands
    return Arm([sft, tuning], rows=write_rows("answers"))


def learn_ways_then_tune(*, seed: int) -> Arm:
    """The game, after fine-tuning on ways around holes."""
    sft = ["sft", str(GAME.with_name("sft.yaml")), "--out", "@arm/sft", "--set", f"seed={seed}"]
    changes = ["model.path=@arm/sft/model", "total_steps=40", "evaluation.at_start=true"]
    return Arm([sft, *tune_file(GAME, *changes, seed=seed).commands], rows=["recipes.text_game.ways"])


def operator(name: str, **args: Any) -> str:
    return f"experience.operators={json.dumps([{'name': name, 'args': args}])}"


def select(kind: str, **changes: Any) -> str:
    selector = {"selector_type": kind, **changes}
    return f"train_dataset={json.dumps({'path': '@kept/pass_rate/train.jsonl', 'task_selector': selector})}"


def change_tasks(name: str, **args: Any) -> str:
    if "BFCL" in os.environ:
        args["path"] = os.environ["BFCL"]
    return f"train_dataset={json.dumps({'path': 'environment', 'operators': [{'name': name, 'args': args}]})}"


SFT_RATE = "trainer.learning_rate=1e-5"
AFTER_SFT = ["model.path=@arm/sft/model", "total_steps=50", "evaluation.interval_steps=50"]
FIELD = "base_pass_rate"
PASS_RATE = [
    "pass-rate",
    str(RECIPE / "run.yaml"),
    "--field",
    FIELD,
    "--tool-key",
    "called",
    "--out",
    "@arm/train.jsonl",
]
BOTS_ARGS = {"m": 8, "target_reward": 0.5, "tau": 0, "do_sample": True}
SELECTORS = {
    "easy2hard": select("offline_easy2hard", feature_keys=[FIELD]),
    "bots": select("difficulty_based", feature_keys=[FIELD], args={**BOTS_ARGS, "prior_count": 8}),
    "pareto": select("pareto", args={"tool_keys": ["called"], "correctness_key": f"{FIELD}_correctness",
                                     "tool_calls_key": f"{FIELD}_tool_calls"}),
}  # fmt: skip
"""On the tasks of `short`, which shuffles them."""
BOTH = evaluate_on("validation", "test")
MULTI_TURN = [
    *("environment.name=bfcl:multi_turn_base", "environment.args.irrelevance=null", "environment.args.pay_turns=true"),
    *("model.max_model_len=16384", "trainer.max_tokens_per_row=16384", "algorithm.batch_size=32", "total_steps=40"),
    "evaluation.at_start=true",
]
"""Needs the package bfcl-eval and mpmath, whose services the conversations are about."""
VARIED = [f"workflow={PLAY_VARIED}", change_tasks(VARY, num_variants=6, max_added=3)]
CURVE = ["total_steps=50", "evaluation.interval_steps=10", "evaluation.at_start=true"]
SHORT_TASKS = change_tasks(SHORT, model="@model", max_prompt=1024)
LEASHED = ["algorithm.kl_coef=0.01", "experience.refill_budget=1.5"]
NEAR_HALF = {"path": "environment", "task_selector": {"selector_type": "difficulty_based", "args": BOTS_ARGS}}
ALL = ["environment.args.irrelevance=688", "environment.num_train=2348"]
ARMS: dict[str, Arm] = {
    "base": Arm([evaluate("@model")]),
    "rl-42": tune(seed=42),
    "rl-1": tune(seed=1),
    "rl-2": tune(seed=2),
    "form-42": tune(operator(FORM), seed=42),
    "shuffled-42": tune(operator(SHUFFLE, seed=42), seed=42),
    "sft_answers-42": fine_tune("answers", "seed=42"),
    "required": Arm([[*evaluate("@model", f"workflow={REQUIRED}"), "--debug"]]),
    "sft_form-42": fine_tune("form", "seed=42", "max_steps=25"),
    "sft_answers_1e-5-42": fine_tune("answers", "seed=42", SFT_RATE),
    **{f"{name}-{seed}": arm for seed in (1, 2) for name, arm in {
        "form": tune(operator(FORM), seed=seed),
        "shuffled": tune(operator(SHUFFLE, seed=seed), seed=seed),
        "sft_answers": fine_tune("answers", f"seed={seed}"),
        "sft_answers_1e-5": fine_tune("answers", f"seed={seed}", SFT_RATE),
    }.items()},
    **{f"sft_rl-{seed}": fine_tune_then_tune(seed=seed) for seed in (42, 1, 2)},
    **{f"rl_all-{seed}": tune(*ALL, seed=seed) for seed in (42, 1, 2)},
    "rl_none-42": tune("environment.args.irrelevance=0", "environment.num_train=1660", seed=42),
    **{f"{name}-{seed}": tune_file(RECIPE / "run.yaml", BOTH, *changes, seed=seed) for seed in (42, 1, 2)
       for name, changes in {
        "varied": VARIED,
        "varied_steady": [*VARIED, *LEASHED],
        "steady": [f"train_dataset={json.dumps(NEAR_HALF)}", *LEASHED],
        "plain": [],
        "short": [SHORT_TASKS, *CURVE],
    }.items()},
    "pass_rate": Arm([[*PASS_RATE, "--set", SHORT_TASKS]]),
    **{f"{name}-{seed}": tune_file(RECIPE / "run.yaml", BOTH, selected, *CURVE, seed=seed, needs="pass_rate")
       for seed in (42, 1, 2) for name, selected in SELECTORS.items()},
    **{f"multi_turn-{seed}": tune(*MULTI_TURN, seed=seed) for seed in (42, 1, 2)},
    **{f"game-{seed}": tune_file(GAME, "evaluation.at_start=true", seed=seed) for seed in (42, 1, 2)},
    **{f"game_ways-{seed}": learn_ways_then_tune(seed=seed) for seed in (42, 1, 2)},
    **{f"game_async-{seed}": tune_file(GAME, "rollout.max_staleness=1", seed=seed) for seed in (42, 1, 2)},
    **{f"guess-{seed}": replace(tune_file(GUESS, seed=seed), rollouts=(1, 40)) for seed in (42, 1, 2)},
    **{f"guess_async-{seed}": tune_file(GUESS, "rollout.max_staleness=1", seed=seed) for seed in (42, 1, 2)},
}  # fmt: skip


@dataclass
class Queue:
    """Runs arms; everything big is in `work`, what is kept of an arm in `work/kept/NAME`."""

    work: Path
    out: Path
    model: str
    is_small: bool
    changes: Sequence[str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    is_cut: bool = False

    @property
    def kept(self) -> Path:
        return self.work / "kept"

    def is_done(self, name: str) -> bool:
        return (self.kept / name / "done.json").is_file()

    def run(self, name: str) -> None:
        """Run the commands of an arm, and keep its small files."""
        arm, folder = ARMS[name], self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        environment = dict(os.environ) | {"MODEL": self.model}
        begun, codes = time.time(), []
        with (folder / "log.txt").open("wb") as log:
            commands = [["-m", "tunesmith", *each] for each in arm.commands]
            if arm.rows:
                environment["ROWS"] = str(folder / "rows.jsonl")
                commands.insert(0, ["-m", *arm.rows, "--out", environment["ROWS"]])
            for command in commands:
                with self.lock:
                    if self.is_cut:
                        break
                    filled = [self.fill(each, folder) for each in [*command, *self.list_changes(command)]]
                    process = subprocess.Popen(
                        [sys.executable, *filled],
                        stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                    )  # fmt: skip
                    self.processes[name] = process
                codes.append(process.wait())
                if codes[-1]:
                    break
        seconds = time.time() - begun
        self.keep(name, {"seconds": seconds, "codes": codes, "begun": begun, "is_cut": self.is_cut})
        shutil.rmtree(folder)
        print(f"{name:22} {'cut' if self.is_cut else codes} after {seconds:.0f} s", flush=True)

    def fill(self, text: str, folder: Path) -> str:
        return text.replace("@kept", str(self.kept)).replace("@model", self.model).replace("@arm", str(folder))

    def list_changes(self, command: Sequence[str]) -> list[str]:
        kind = command[2]
        if command[1] != "tunesmith":
            return []
        small = [*SMALL.get(kind, ()), *(SMALL_SAMPLER if kind != "sft" else ())] if self.is_small else []
        given = [*small, *(self.changes if kind != "sft" else ())]
        return [part for each in given for part in ("--set", each)]

    def keep(self, name: str, record: dict[str, Any]) -> None:
        """Copy the small files of an arm, and pack what is kept of all arms."""
        folder, target = self.work / name, self.kept / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for pattern in KEPT:
            for file in folder.rglob(pattern):
                shutil.copy(file, target / file.name)
        for step in ARMS[name].rollouts:
            for file in folder.rglob(f"rollouts/step_{step:06}.parquet"):
                shutil.copy(file, target / file.name.replace("step", "rollouts"))
        is_done = not record["is_cut"] and not any(record["codes"])
        (target / ("done.json" if is_done else "failed.json")).write_text(json.dumps(record))
        with self.lock:
            self.pack()

    def pack(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        packed = self.work / "arms.tar.gz"
        with tarfile.open(packed, "w:gz", compresslevel=6) as archive:
            archive.add(self.kept, arcname="kept")
        data = packed.read_bytes()
        for number, start in enumerate(range(0, len(data), PIECE)):
            piece = self.out / f"arms.tar.gz.{number}"
            (self.work / "piece").write_bytes(data[start : start + PIECE])
            shutil.move(self.work / "piece", piece)

    def stop(self) -> None:
        """End what runs; the threads then keep what there is."""
        with self.lock:
            self.is_cut = True
            for process in self.processes.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for running arms, on a large disk")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is kept, packed")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="all, in the order of the table, without it")
    parser.add_argument("--jobs", type=int, default=3, help="arms at a time")
    parser.add_argument("--limit-s", type=float, default=1e9, help="seconds after which running arms are cut")
    parser.add_argument("--small", action="store_true", help="two steps of two tasks, to try the script on a CPU")
    parser.add_argument("--set", action="append", default=[], help="change of all run files, as in tunesmith tune")
    arguments = parser.parse_args()
    work, out = arguments.work.resolve(), arguments.out.resolve()
    queue = Queue(work, out, os.environ["MODEL"], arguments.small, arguments.set)
    end, waiting = time.time() + arguments.limit_s, list(arguments.arms)
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        while waiting or running:
            waiting = [each for each in waiting if not queue.is_done(each)]
            ready = [each for each in waiting if (needs := ARMS[each].needs) is None or queue.is_done(needs)]
            for name in ready[: arguments.jobs - len(running)]:
                waiting.remove(name)
                running[pool.submit(queue.run, name)] = name
            if not running:
                print("not run:", *waiting)
                break
            timeout = None if queue.is_cut else max(0.0, end - time.time())
            done, _ = wait(running, timeout=timeout, return_when=FIRST_COMPLETED)
            for each in done:
                running.pop(each)
                each.result()
            if time.time() >= end and not queue.is_cut:
                queue.stop()
                print("limit reached; not begun:", *waiting, flush=True)
                waiting = []


if __name__ == "__main__":
    main()
