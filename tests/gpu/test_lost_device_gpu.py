"""A run that loses its device or runs out of memory ends with one clear error and resumes from its last checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
NUM_STEPS, JUDGED_A_STEP = 4, 8
AGENT = textwrap.dedent(
    """
    import os
    import torch
    from tunesmith import JudgeOutput, WorkflowOutput

    judged = []

    async def workflow(task, model):
        answer = await model([{"role": "user", "content": task["question"]}])
        return WorkflowOutput(response=answer.choices[0].message.content)

    async def judge(task, response):
        judged.append(response)
        if len(judged) == int(os.environ["FAILS_AT"]):
            if os.environ["FAILURE"] == "device":
                torch.zeros(2, device="cuda")[torch.tensor([7], device="cuda")]  # a device-side assert
            else:
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(1e-6)
        return JudgeOutput(reward=float(len(response) % 5))
    """
)
SETTINGS = {
    "workflow": "agent.py:workflow",
    "judge": "agent.py:judge",
    "checkpoint_root_dir": "runs",
    "name": "run",
    "total_steps": NUM_STEPS,
    "save_interval_steps": 1,
    "model": {"path": "pocket", "max_model_len": 128, "max_tokens": 12, "device": "cuda"},
    "train_dataset": {"path": "data"},
    "algorithm": {"batch_size": 2, "group_size": JUDGED_A_STEP // 2},
    "engine": {"kv_cache_tokens": 8192},
    "rollout": {"chat_model": "openai"},
    "trainer": {"learning_rate": 1e-4, "has_row_graphs": False, "has_compiled_layers": False, "mismatch_stop": 100.0},
}


def run_tune(folder: Path, failure: str, *, fails_at: int) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "FAILURE": failure, "FAILS_AT": str(fails_at), "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "tunesmith", "tune", "run.yaml", "--resume"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "messages"),
    [("device", ("device can no longer be used", "last checkpoint")), ("memory", ("out of memory", "lower "))],
)
def test_the_error_states_what_to_do_and_the_run_resumes(tmp_path, pocket_folder, failure, messages):
    (tmp_path / "pocket").symlink_to(pocket_folder)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "data").mkdir()
    questions = [f"Tom has {n} apples and buys {n + 3} more. How many apples does Tom have now?" for n in range(12)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    (tmp_path / "run.yaml").write_text(json.dumps(SETTINGS))
    broken = run_tune(tmp_path, failure, fails_at=2 * JUDGED_A_STEP + 1)
    assert broken.returncode == 1, broken.stderr[-2000:]
    assert all(message in broken.stderr for message in messages), broken.stderr[-2000:]
    done = run_tune(tmp_path, failure, fails_at=0)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "runs/tunesmith/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
