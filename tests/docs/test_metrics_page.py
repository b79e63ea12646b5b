"""docs/guides/metrics.md lists every metric that the code logs, and only those."""

from __future__ import annotations

import ast
import functools
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

from markdown_pages import INLINE_CODE, ROOT, iter_prose

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune

PAGE = ROOT / "docs" / "guides" / "metrics.md"
PREFIXES = (
    "algorithm", "cluster", "correction", "critic", "distillation", "engine", "eval", "experience", "expert",
    "mismatch", "perf", "preference", "rollout", "routing", "selector", "staleness", "train",
)  # fmt: skip
METRIC = re.compile(rf"(?:{'|'.join(PREFIXES)})(?:/[\w@<>]*[^\W_]>?)+")


@functools.cache
def list_documented() -> set[str]:
    """Metrics in the first column of the page's tables; `<name>` stands for any name."""
    cells = [line.split("|")[1] for _, line in iter_prose(PAGE) if line.startswith("| ")]
    names = {name for cell in cells for name in INLINE_CODE.findall(cell)}
    assert all(METRIC.fullmatch(name) for name in names)
    return names


def list_in_code() -> set[str]:
    """Texts in the code that have the form of a metric's name."""
    found = set()
    for path in (ROOT / "tunesmith").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
                found.add(node.value)
    return found


def is_documented(name: str) -> bool:
    patterns = (re.sub(r"<\w+>|(?<=@)k$", "*", documented) for documented in list_documented())
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def test_metrics_named_in_the_code_are_documented() -> None:
    assert not sorted(name for name in list_in_code() if not is_documented(name))


def test_documented_metrics_exist() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tunesmith").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    missing = []
    for name in list_documented():
        last = name.rpartition("/")[2]
        short = re.sub(r"^num_(stop_|failed_)?", "", last)
        if "<metric>" not in name and "@" not in name and not {last, short} & words:
            missing.append(name)
    assert not sorted(missing)


async def ask(task, model):
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
    )
    return WorkflowOutput(response=completion.choices[0].message.content, metrics={"calls": 1.0})


async def judge(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response)) % 7), metrics={"accuracy": 1.0})


def test_metrics_of_a_run_are_documented(tmp_path: Path, pocket_folder: str) -> None:
    for split in ("train", "test"):
        rows = [{"question": f"Tom has {number} apples.", "answer": str(number)} for number in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tune(
        workflow_func=ask,
        judge_func=judge,
        model=TunerModelConfig(model_path=pocket_folder, max_model_len=128, max_tokens=4),
        train_dataset=DatasetConfig(path=str(tmp_path), total_steps=1),
        eval_dataset={"test": DatasetConfig(path=str(tmp_path), split="test")},
        algorithm=AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-3),
        overrides=[f"checkpoint_root_dir={tmp_path}", "algorithm.kl_coef=0.01", "monitor.has_progress=false"],
    )
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    logged = {name for line in lines for name in line} - {"step", "kind"}
    assert {"rollout/accuracy/mean", "train/kl", "eval/test/reward"} <= logged
    assert not sorted(name for name in logged if not is_documented(name))
