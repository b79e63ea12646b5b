"""The search and Python agent's pipeline at a small size: an expert's rows, SFT, two steps with the efficiency reward,
and the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandboxes import require_isolation
from search_corpora import needs_bm25
from tunesmith import run_pipeline
from tunesmith.experience.store import load_rollouts

pytestmark = needs_bm25
RECIPE = Path(__file__).parents[2] / "recipes" / "tool_agent" / "pocket.yaml"
SMALL = (
    "variables.world.num_documents=80", "variables.world.num_train=96", "variables.world.num_test=2",
    "variables.environment.max_tokens=120", "stages.sft.num_epochs=3", "stages.sft.max_tokens_per_batch=1400",
    "stages.rl.total_steps=2",
    "stages.rl.algorithm.batch_size=4", "stages.rl.algorithm.group_size=6", "stages.rl.trainer.warmup_steps=0",
    "stages.rl.monitor.has_progress=false", "stages.sft.monitor.has_progress=false", "stages.eval.has_progress=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    require_isolation("auto")
    place = tmp_path_factory.mktemp("tool_agent")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(RECIPE.parents[2])
        run_pipeline(RECIPE, overrides=[f"folder={place}", *SMALL])
    return place


@pytest.fixture(scope="module")
def steps(folder):
    lines = [json.loads(line) for line in (folder / "rl" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_the_agent_calls_its_tools_and_is_trained(steps):
    assert len(steps) == 2
    assert sum(line["rollout/tool_calls/mean"] for line in steps) > 0
    assert sum(line["algorithm/num_trained_groups"] for line in steps) > 0
    assert max(line.get("train/grad_norm", 0.0) for line in steps) > 0


def test_the_operator_reads_the_recorded_counts_and_the_format(steps):
    for line in steps:
        assert line["experience/efficiency_reward/tool_calls_mean"] == pytest.approx(line["rollout/tool_calls/mean"])
        invalid = line["experience/efficiency_reward/num_invalid_formats"]
        assert invalid == pytest.approx(24 * (1 - line["rollout/format/mean"]))


def test_turns_of_a_rollout_extend_each_other(folder):
    files = (folder / "rl" / "rollouts").glob("*.parquet")
    groups = [group for file in files for group in load_rollouts(file)]
    runs = [run for group in groups for run in group.trajectories if len(run.turns) > 1]
    assert runs
    for run in runs:
        for before, after in zip(run.turns, run.turns[1:], strict=False):
            ids = before.prompt_ids + before.sampled_ids
            assert after.prompt_ids[: len(ids)] == ids


def test_the_comparison_has_the_recorded_tool_calls(folder):
    comparison = json.loads((folder / "eval" / "comparison.json").read_text())
    text = json.dumps(comparison)
    assert "search_calls" in text and "refused_calls" in text
