"""Build the graded task set on which random batches and BOTS train the pocket model.

    python -m benchmarks.tasks.bots_pocket --out graded
    python -m benchmarks.tasks.bots_train grade --measured graded/measured.jsonl --out graded/train.jsonl
    python -m benchmarks.tasks.bots_train train --config graded/run.yaml --data graded/train.jsonl --seeds 5 --out FILE

The demonstrations solve long problems with the calculator, short ones almost never and medium ones half of the time, so
most tasks are too easy or too hard for the fine-tuned model. Its pass rate on every task is measured as by `tunesmith
pass-rate` and written with the task. Held-out problems have the same shares of grades as the tasks that `grade` keeps,
by their number of operations.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import yaml

from benchmarks.shared.demo_stages import finetune
from benchmarks.tasks.bots_train import SHARES, name_grade
from tunesmith import measure_pass_rates
from tunesmith.commands.demo.agent import build_demonstrations
from tunesmith.storage import load_json_lines
from tunesmith.tasks.arithmetic import Problem, Split, build_problems

SHARES_WITHOUT_TOOL = {"hard": {1: 0.97, 2: 0.5, 3: 0.0}, "unlocking": {1: 0.9, 2: 0.6, 3: 0.0}}
"""Task set -> number of operations -> share of the demonstrations without the tool. In `hard` the model calls the tool
for one short problem in 33, so training seldom sees it succeed; in `unlocking` one in ten is enough to learn it."""
GRADE_OF = {3: "easy", 2: "within reach", 1: "hard"}
"""Number of operations -> the intended grade of its problems."""
NUM_RUNS = 8


def draw_graded(split: Split, *, num_tasks: int, seed: int) -> list[Problem]:
    """Problems in the shares of their intended grades, shuffled."""
    pool = build_problems(split, num_problems=4 * num_tasks, seed=seed)
    kept: list[Problem] = []
    for num_operations, grade in GRADE_OF.items():
        of_grade = [problem for problem in pool if problem.num_operations == num_operations]
        kept += of_grade[: round(SHARES[grade] * num_tasks)]
    random.Random(seed).shuffle(kept)
    return kept


def save_rows(path: Path, problems: list[Problem]) -> None:
    rows = [{"question": each.question, "answer": each.answer, "operations": each.num_operations} for each in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_run(root: Path, model: Path, *, num_steps: int) -> dict[str, object]:
    """The run file: the settings of the demo, with frequent evaluation."""
    return {
        "project": "bots",
        "checkpoint_root_dir": str(root / "runs"),
        "workflow": "tunesmith.commands.demo.agent:solve_problem",
        "judge": "tunesmith.commands.demo.agent:judge_answer",
        "total_steps": num_steps,
        "save_interval_steps": num_steps,
        "model": {"path": str(model), "device": "cpu", "max_model_len": 512, "max_tokens": 48},
        "train_dataset": {"path": str(root / "tasks.jsonl"), "required_fields": ["question", "answer"]},
        "eval_datasets": {"test": {"path": str(root / "test.jsonl")}},
        "algorithm": {"algorithm_type": "multi_step_grpo", "batch_size": 16, "group_size": NUM_RUNS},
        "trainer": {"learning_rate": 2e-4, "betas": [0.9, 0.95]},
        "evaluation": {"interval_steps": 2, "at_start": True, "num_samples": 2},
        "monitor": {"log_interval_steps": num_steps, "has_progress": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="output folder")
    parser.add_argument("--task-set", choices=tuple(SHARES_WITHOUT_TOOL), default="hard", help="see the source")
    parser.add_argument("--num-tasks", type=int, default=1200, help="training tasks")
    parser.add_argument("--num-held-out", type=int, default=400, help="held-out tasks")
    parser.add_argument("--steps", type=int, default=24, help="training steps of the run file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    root = Path(arguments.out).absolute()
    problems = build_problems("train", num_problems=2500, seed=arguments.seed)
    shares = SHARES_WITHOUT_TOOL[arguments.task_set]
    rows = build_demonstrations(problems, seed=arguments.seed, share_without_tool=shares)
    model = finetune(root, rows, seed=arguments.seed)
    save_rows(root / "tasks.jsonl", draw_graded("train", num_tasks=arguments.num_tasks, seed=arguments.seed))
    save_rows(root / "test.jsonl", draw_graded("test", num_tasks=arguments.num_held_out, seed=arguments.seed))
    (root / "run.yaml").write_text(yaml.safe_dump(build_run(root, model, num_steps=arguments.steps), sort_keys=False))
    measured = root / "measured.jsonl"
    measure_pass_rates(root / "run.yaml", field="pass_rate", num_runs=NUM_RUNS, out=measured)
    rows = load_json_lines(measured)
    grades = Counter(name_grade(row["pass_rate"]) for row in rows)
    print(json.dumps({name: grades[name] / len(rows) for name in SHARES}))


if __name__ == "__main__":
    main()
