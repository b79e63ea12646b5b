"""A small run folder as `tunesmith tune` writes it, with hostile text in everything that a model or a user writes."""

from __future__ import annotations

import json
from pathlib import Path

from tunesmith.experience.step_files import JSON_STEPS, StepFiles
from tunesmith.experience.store import ROLLOUT_STEPS, save_rollouts
from tunesmith.model.pocket import build_pocket_tokenizer
from tunesmith.monitor.metrics_file import append_metrics
from tunesmith.storage import DONE, RunPaths, save_json, save_text
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'
NUM_STEPS, GROUP_SIZE = 4, 3
TOKENIZER = build_pocket_tokenizer()


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def build_turn(prompt: tuple[int, ...], reply: str, *, version: int = 0, is_trained: bool = True) -> Turn:
    sampled = encode(f"{reply}<|im_end|>")
    return Turn(
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=tuple(-0.1 * (index % 5) for index in range(len(sampled))),
        policy_versions=(version,) * len(sampled),
        distribution=Distribution(temperature=0.7),
        stop_reason="eos",
        is_trained=is_trained,
    )


def build_tool_turns(question: str, answer: str, *, version: int) -> tuple[Turn, ...]:
    """A call of the tool, and the answer after its result."""
    prompt = encode(
        f"<|im_start|>system\nUse the tool.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    first = build_turn(prompt, CALL % question[:5].replace('"', ""), version=version)
    middle = encode(f"\n<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n")
    return first, build_turn(prompt + first.sampled_ids + middle, f"The answer is {answer}.", version=version)


def build_group(step: int, index: int) -> Group:
    """Rollouts with rewards 0 and 1, and a failed one in every second group."""
    question = f"{index} + {step} {HOSTILE if index == 0 else ''}"
    task = Task(task_id=f"train/{index}", index=index, row={"question": question, "answer": str(index + step)})
    runs = []
    for number in range(GROUP_SIZE):
        has_failed = number == 2 and index % 2 == 0
        answer = str(index + step) if number else f"wrong {HOSTILE}"
        failure = Failure(
            where="judge",
            message=f"ValueError: no number in {HOSTILE}",
            line="judge.py:3 in judge",
            traceback=f"Traceback (most recent call last):\nValueError: {HOSTILE}\n",
        )
        runs.append(
            Trajectory(
                task=task,
                run_index=number,
                turns=build_tool_turns(question, answer, version=step - 1),
                reward=None if has_failed else float(number > 0),
                failure=failure if has_failed else None,
                response_text=f"The answer is {answer}.",
                metrics={"accuracy": float(number > 0)},
            )
        )
    return Group(task=task, trajectories=tuple(runs))


def write_run(root: Path, *, num_groups: int = 2, has_merged: bool = True) -> Path:
    """A finished run of `NUM_STEPS` steps, of which the first two are merged into one file."""
    paths = RunPaths(root)
    root.mkdir(parents=True)
    config = f"name: {root.name}\ntotal_steps: {NUM_STEPS}\nmodel: {{path: pocket}}\n"
    save_text(paths.config, f"{config}algorithm: {{algorithm_type: grpo}}\n")
    for step in range(1, NUM_STEPS + 1):
        write_step(paths, step, num_groups=num_groups)
        append_metrics(
            paths.metrics,
            step,
            "train",
            {"rollout/reward_mean": step / 10, "train/loss": float("nan") if step == 2 else 1.0, "perf/step_s": 2.0},
        )
    append_metrics(paths.metrics, NUM_STEPS, "eval", {"eval/test/reward": 0.5, "perf/evaluation_s": 1.5})
    if has_merged:
        StepFiles(paths.rollouts(0).parent, ROLLOUT_STEPS).merge(committed_step=2, steps_per_file=2)
        StepFiles(paths.selection(0).parent, JSON_STEPS).merge(committed_step=2, steps_per_file=2)
    for step, reward in ((0, 0.0), (NUM_STEPS, 1.0)):
        save_json(paths.evaluation(step), {"test": build_evaluation(step, reward)})
    folder = paths.checkpoint(NUM_STEPS)
    folder.mkdir()
    TOKENIZER.save_pretrained(folder)
    save_json(folder / DONE, {"step": NUM_STEPS})
    return root


def write_step(paths: RunPaths, step: int, *, num_groups: int) -> None:
    groups = [build_group(step, index) for index in range(num_groups)]
    advantages = [[-0.5, 0.5, None if index % 2 == 0 else 0.5] for index in range(num_groups)]
    save_rollouts(paths.rollouts(step), groups, advantages)
    choices = [
        {
            "index": index,
            "task_id": f"train/{index}",
            "reason": f"near the target {HOSTILE}",
            "numbers": {"expected_pass_rate": 0.5},
        }
        for index in range(num_groups)
    ]
    save_json(paths.selection(step), {"choices": choices, "summary": {"selector/rho": 0.2}, "histogram": [0, 2, 1]})


def build_evaluation(step: int, reward: float) -> dict[str, object]:
    tasks = [
        {"task_id": f"test/{index}", "row": {"question": f"{index} + 1?"}, "rewards": [reward if index else 0.0],
         "failures": [], "responses": [f"step {step}: {HOSTILE}"], "num_sampled_tokens": [5]}
        for index in range(3)
    ]  # fmt: skip
    return {"name": "test", "policy_version": step, "mean": reward, "interval_95": [0.1, 0.9], "num_failures": 0,
            "metrics": {}, "pass_at_k": {}, "tasks": tasks}  # fmt: skip


def write_comparison(root: Path) -> Path:
    """The folder of `tunesmith eval --out`."""
    attempt = {"reward": 1.0, "metrics": {}, "failure": None, "response": "from sft", "sampled_tokens": 4}
    attempt |= {"tool_calls": 0, "turns": 1, "truncated": False}
    estimates = {"reward": {"mean": 1.0, "interval": [0.9, 1.0]}}
    tasks = [{"task_id": "test/1", "attempts": [attempt]}]
    model = {"path": "sft", "num_tasks": 1, "num_runs": 1, "estimates": estimates, "tasks": tasks}
    root.mkdir(parents=True)
    (root / "comparison.json").write_text(json.dumps({"test": {"models": {"sft": model}, "contrasts": []}}))
    return root
