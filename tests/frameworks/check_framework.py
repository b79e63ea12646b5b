"""Checks one framework in its own environment; prints the outcome as one line of JSON.

The recipe's agent runs against an engine with scripted replies (a tool call, then an answer), then trains the pocket
model for a step. In both, every sampled token must be in exactly one sample, with its mask.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import re
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from chat_templates import QWEN25  # noqa: E402
from environments import FRAMEWORKS, Framework  # noqa: E402
from fakes import FakeEngine, build_chat_tokenizer, say  # noqa: E402
from tunesmith import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune  # noqa: E402
from tunesmith.chat.renderer import Renderer  # noqa: E402
from tunesmith.engine.engine import LocalEngine  # noqa: E402
from tunesmith.experience.samples import build_samples  # noqa: E402
from tunesmith.experience.store import load_rollouts  # noqa: E402
from tunesmith.model.prepare import prepare_model  # noqa: E402
from tunesmith.rollout.runner import Agent, run_trajectory  # noqa: E402
from tunesmith.rollout.service import ModelService  # noqa: E402
from tunesmith.types import Group, Sampling, Task, Trajectory  # noqa: E402

TASK = {"question": "What is 2 + 3?", "answer": "5"}


def load_recipe(framework: Framework):
    path = ROOT / "recipes" / "frameworks" / f"{framework.recipe}.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{framework.recipe}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, framework.function), module.judge


def count_samples(trajectories: list[Trajectory]) -> tuple[int, int]:
    """Sampled tokens of all samples, and samples beyond the first of each trajectory."""
    task = trajectories[0].task
    group = Group(task=task, trajectories=tuple(trajectories))
    samples, metrics = build_samples([group], [[1.0] * len(trajectories)])
    return sum(sum(sample.is_sampled) for sample in samples), int(metrics["rollout/num_branches"])


async def run_scripted(framework: Framework) -> Trajectory:
    workflow, judge = load_recipe(framework)
    tokenizer = build_chat_tokenizer(QWEN25)
    engine = FakeEngine(tokenizer, say(tokenizer, *framework.replies))
    service = ModelService(engine, Renderer(tokenizer), model_name="policy", sampling=Sampling(max_tokens=300))
    task = Task(task_id="t", index=0, row=TASK)
    agent = Agent(workflow=workflow, judge=judge, timeout_s=60.0)
    trajectory = await run_trajectory(task, 0, agent=agent, model=service, auxiliary_models={}, seed=1)
    ledger = sorted((prompt, tuple(sampled)) for prompt, sampled in engine.ledger)
    assert sorted((turn.prompt_ids, turn.sampled_ids) for turn in trajectory.turns) == ledger, "a call is not recorded"
    return trajectory


def check_scripted(framework: Framework) -> dict:
    """The agent calls the tool, reads its result, and answers."""
    trajectory = asyncio.run(run_scripted(framework))
    assert trajectory.failure is None, trajectory.failure
    assert trajectory.reward == 1.0, trajectory.response_text
    num_trained, num_branches = count_samples([trajectory])
    assert num_trained == sum(len(turn.sampled_ids) for turn in trajectory.turns), "tokens are not trained once"
    return {"turns": len(trajectory.turns), "branches": num_branches}


def check_training(framework: Framework, folder: Path) -> dict:
    """One training step of the pocket model with the recipe's agent."""
    workflow, judge = load_recipe(framework)
    ledger = []
    generate = LocalEngine.generate

    async def generate_and_count(self, *arguments, **options):
        completion = await generate(self, *arguments, **options)
        ledger.append(completion.sampled_ids)
        return completion

    async def judge_length(task, response):
        verdict = await judge(task, response)
        verdict.reward += sum(map(ord, str(response))) % 7  # so that rewards of a group differ
        return verdict

    LocalEngine.generate = generate_and_count
    data = folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(TASK) + "\n" for _ in range(2)))
    result = tune(
        workflow_func=workflow,
        judge_func=judge_length,
        train_dataset=DatasetConfig(path=str(data), total_steps=1),
        model=TunerModelConfig(
            model_path=str(prepare_model("pocket", folder / "pocket")), max_model_len=8192, max_tokens=12
        ),
        algorithm=AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-3),
        overrides=(
            "rollout.chat_model=openai", "model.device=cpu", "engine.kv_cache_tokens=65536",
            f"checkpoint_root_dir={folder / 'out'}", "rollout.max_failure_rate=0",
        ),
    )  # fmt: skip
    (rollouts,) = (result.folder / "rollouts").glob("step*.parquet")
    trajectories = [each for group in load_rollouts(rollouts) for each in group.trajectories]
    assert not [each.failure for each in trajectories if each.failure]
    num_sampled = sum(map(len, ledger))
    num_trained = sum(count_samples(list(group.trajectories))[0] for group in load_rollouts(rollouts))
    assert num_trained == num_sampled, f"{num_sampled} tokens sampled, {num_trained} in samples"
    return {"sampled_tokens": num_sampled, "trained_tokens": num_trained}


def main() -> int:
    framework = FRAMEWORKS[int(sys.argv[1])]
    package = re.split(r"[\[=]", framework.packages[0])[0]
    outcome = asdict(framework) | {"version": importlib.metadata.version(package), "ok": False}
    try:
        outcome |= check_scripted(framework)
        with tempfile.TemporaryDirectory() as folder:
            outcome |= check_training(framework, Path(folder))
        outcome["ok"] = True
    except Exception as error:  # noqa: BLE001 - the outcome is the report
        traceback.print_exc()
        outcome["error"] = f"{type(error).__name__}: {error}"
    print("OUTCOME " + json.dumps(outcome))
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
