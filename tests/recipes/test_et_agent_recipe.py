"""ET-Agent's curriculum at a small size: rounds of rollouts, Pareto sampling and training, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandboxes import require_isolation
from search_corpora import needs_bm25
from tunesmith import run_pipeline

pytestmark = needs_bm25
RECIPE = Path(__file__).parents[2] / "recipes" / "et_agent" / "pocket.yaml"
SMALL = (
    "variables.world.num_documents=80", "variables.world.num_train=96", "variables.world.num_test=4",
    "variables.environment.max_tokens=160", "stages.sft.max_steps=10", "stages.sft.monitor.has_progress=false",
    "stages.curriculum.count=2", "stages.curriculum.stages.pass_rate.max_tasks=12",
    "stages.curriculum.stages.pass_rate.num_runs=8", "stages.curriculum.stages.pass_rate.experience.outcome_key=null",
    "stages.curriculum.stages.pareto.num_selected=4", "stages.curriculum.stages.rl.total_steps=1",
    "stages.curriculum.stages.rl.algorithm.batch_size=4", "stages.curriculum.stages.rl.algorithm.group_size=4",
    "stages.eval.models.round2=stage:curriculum", "stages.eval.models.round3=stage:sft",
    "stages.eval.has_progress=false",
)  # fmt: skip
JUDGE = """
from tunesmith import JudgeOutput

async def judge(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response.text)) % 2))
"""
"""The small model answers nothing correctly, so the questions are selected by another score."""


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    require_isolation("auto")
    place = tmp_path_factory.mktemp("et_agent")
    (place / "parity.py").write_text(JUDGE)
    judge = f"stages.curriculum.stages.pass_rate.judge={place / 'parity.py'}:judge"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(RECIPE.parents[2])
        run_pipeline(RECIPE, overrides=[f"folder={place / 'out'}", *SMALL, judge])
    return place / "out"


def test_each_round_selects_questions_whose_rollouts_differ(folder):
    for number in (1, 2):
        selected = read(folder / f"pareto_{number}" / "train.jsonl")
        assert 0 < len(selected) <= 4
        for row in selected:
            assert len(row["pass_rate_correctness"]) == len(row["pass_rate_tool_calls"]) > 1
            assert len(set(row["pass_rate_correctness"])) == 2


def test_each_round_trains_the_model_of_the_one_before_with_a_smaller_sigma(folder):
    steps = [read(folder / f"rl_{number}" / "metrics.jsonl")[0] for number in (1, 2)]
    assert [step["experience/efficiency_reward/sigma_tool"] for step in steps] == [0.2, 0.1]
    start = json.loads((folder / "stages" / "rl_2" / "START.json").read_text())
    assert start["values"]["model"]["path"] == "stage:rl_1"


def test_the_report_has_the_behavior_of_every_model(folder):
    report = (folder / "report.md").read_text()
    section = report[report.index("## Behavior of all models") :]
    assert all(f"| {name} " in section for name in ("base", "sft", "round1", "round2"))
