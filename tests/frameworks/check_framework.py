"""Checks one framework in its own environment; prints the outcome as one line of JSON.

The recipe's agent, and an agent for each feature, run in training steps of the pocket model with scripted replies. What
the engine delivered must be what the turns record, token for token, and every sampled token must be in exactly one
training sample, with its mask. The recipe's agent also trains for a step on what the pocket model samples by itself.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from cases import FEATURES, Case  # noqa: E402
from scripted_policy import ScriptedPolicy  # noqa: E402

from environments import FRAMEWORKS, Framework  # noqa: E402
from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, tune  # noqa: E402
from tunesmith.experience.samples import build_samples  # noqa: E402
from tunesmith.experience.store import load_rollouts  # noqa: E402
from tunesmith.model.prepare import prepare_model  # noqa: E402
from tunesmith.types import Group, Sample, Trajectory  # noqa: E402

MAX_ERROR_CHARS = 600
TASK = {"question": "What is 2 + 3?", "answer": "5"}
FIELDS = {  # of a result -> how it is read
    "turns": lambda trajectories, samples: len(trajectories[0].turns),
    "branches": lambda trajectories, samples: len(samples) // len(trajectories) - 1,
    "sampled_tokens": lambda trajectories, samples: sum(sum(sample.is_sampled) for sample in samples),
    "call_tokens": lambda trajectories, samples: sum(
        len(turn.prompt_ids) + len(turn.sampled_ids) for each in trajectories for turn in each.turns
    ),
    "merged_tokens": lambda trajectories, samples: sum(len(sample.token_ids) for sample in samples),
}


def load_module(folder: str, name: str) -> ModuleType:
    path = ROOT / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_step(
    framework: Framework, workflow: Callable[..., Any], *, is_answer_checked: bool, max_tokens: int
) -> tuple[list[Trajectory], list[Sample]]:
    """The rollouts of one training step and their samples."""

    async def judge(task, response):
        text = str(getattr(response, "get_text_content", lambda: response)())
        assert not is_answer_checked or task["answer"] in text, f"the agent answered {text!r}"
        return JudgeOutput(reward=1.0)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        (folder / "data" / "train.jsonl").write_text(json.dumps(TASK) + "\n")
        result = tune(
            workflow_func=workflow,
            judge_func=judge,
            train_dataset=DatasetConfig(path=str(folder / "data"), total_steps=1),
            model=TunerModelConfig(
                model_path=str(prepare_model("pocket", folder / "pocket")), max_model_len=8192, max_tokens=max_tokens
            ),
            algorithm=AlgorithmConfig(algorithm_type="reinforce", group_size=2, batch_size=1, learning_rate=1e-3),
            overrides=(
                f"rollout.chat_model={framework.chat_model}", "model.device=cpu", "engine.kv_cache_tokens=65536",
                f"checkpoint_root_dir={folder / 'out'}", "rollout.max_failure_rate=0", "rollout.timeout_s=300",
                *(["rollout.http_port=0"] if framework.is_http else []),
            ),
        )  # fmt: skip
        (rollouts,) = (result.folder / "rollouts").glob("step*.parquet")
        groups = load_rollouts(rollouts)
    trajectories = [each for group in groups for each in group.trajectories]
    assert result.has_learned, "the step did not change the weights"
    return trajectories, merge_turns(groups)


def merge_turns(groups: Sequence[Group]) -> list[Sample]:
    samples, _ = build_samples(groups, [[1.0] * len(group.trajectories) for group in groups])
    return samples


def check_record(policy: ScriptedPolicy, trajectories: Sequence[Trajectory], samples: Sequence[Sample]) -> None:
    """What the engine delivered is what the turns record and what is trained, once each."""
    delivered = Counter((each.prompt_ids, tuple(each.sampled_ids)) for each in policy.calls if each.sampled_ids)
    recorded = Counter((turn.prompt_ids, turn.sampled_ids) for each in trajectories for turn in each.turns)
    assert recorded == delivered, "the recorded turns differ from what the engine sampled"
    logprobs = sorted(tuple(each.logprobs) for each in policy.calls if each.sampled_ids)
    recorded_logprobs = sorted(turn.logprobs for each in trajectories for turn in each.turns)
    assert recorded_logprobs == logprobs, "the recorded logprobs differ from the engine's"
    trained = Counter(
        (sample.token_ids[: span.start], sample.token_ids[span.start : span.end])
        for sample in samples
        for span in sample.distribution_spans
    )
    assert trained == delivered, "a sampled token is not in exactly one sample"
    for sample in samples:
        spans = {index for span in sample.distribution_spans for index in range(span.start, span.end)}
        assert spans == {index for index, is_sampled in enumerate(sample.is_sampled) if is_sampled}, "a wrong mask"


def run_scripted(framework: Framework, workflow: Callable[..., Any], replies: Sequence[Any]) -> dict[str, Any]:
    policy = ScriptedPolicy(replies)
    with policy.replace_draws():
        trajectories, samples = run_step(framework, workflow, is_answer_checked=True, max_tokens=1000)
    check_record(policy, trajectories, samples)
    assert len({len(each.turns) for each in trajectories}) == 1, "two equal rollouts have different numbers of turns"
    return {name: read(trajectories, samples) for name, read in FIELDS.items()}


def check_recipe(framework: Framework) -> dict[str, Any]:
    """The recipe's agent with scripted replies, then with the pocket model's own."""
    workflow = getattr(load_module("recipes/frameworks", framework.recipe), framework.function)
    outcome = run_scripted(framework, workflow, framework.replies)
    run_step(framework, workflow, is_answer_checked=False, max_tokens=12)
    return outcome


def check_case(framework: Framework, case: Case) -> dict[str, Any]:
    outcome = run_scripted(framework, case.workflow, case.replies)
    for name, expected in (("turns", case.num_turns), ("branches", case.num_branches)):
        assert outcome[name] == expected, f"{outcome[name]} {name}, not {expected}"
    return outcome


def try_check(check: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    try:
        return {"ok": True, "error": None} | check(*arguments)
    except Exception as error:  # noqa: BLE001 - the outcome is the report
        traceback.print_exc()
        return {"ok": False, "error": " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]}


def main() -> int:
    framework, features = FRAMEWORKS[int(sys.argv[1])], sys.argv[2:]
    package = re.split(r"[\[=]", framework.packages[0])[0]
    outcome: dict[str, Any] = {"version": importlib.metadata.version(package)}
    if not features:
        outcome |= try_check(check_recipe, framework)
    module = load_module("tests/frameworks/features", framework.features)
    cases = {case.feature: case for case in getattr(module, framework.cases)}
    absent = getattr(module, framework.absent)
    assert not cases.keys() & absent.keys() and cases.keys() | absent.keys() == FEATURES.keys()
    outcome["features"] = {
        feature: {"absent": absent[feature]} if feature in absent else try_check(check_case, framework, cases[feature])
        for feature in features or FEATURES
    }
    print("OUTCOME " + json.dumps(outcome))
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
