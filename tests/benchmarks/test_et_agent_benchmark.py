"""The benchmark of ET-Agent's orderings: what its arms change in the recipe, and its verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.et_agent import jobs, orderings


@pytest.fixture
def plan(tmp_path):
    return jobs.Plan(folder=tmp_path, seed=3, arms=list(jobs.ARMS), overrides={"variables.world.num_train": 70})


def write_done(folder: Path, stage: str, **fields: object) -> None:
    (folder / "stages" / stage).mkdir(parents=True)
    (folder / "stages" / stage / "DONE.json").write_text(json.dumps(fields))


def test_jobs_refer_to_the_files_of_other_jobs(plan):
    shared = plan.job_folder("shared")
    write_done(shared, "prompted", model="prompted/model")
    flywheel = next(job for job in plan.list_jobs() if job.name == "seed3/flywheel").build()
    assert flywheel["stages"]["flywheel"]["model"]["path"] == str(shared / "prompted/model")
    assert flywheel["stages"]["rft_filter"]["data"] == "stage:flywheel/trajectories.jsonl"
    index = flywheel["variables"]["environment"]["tools"][0]["settings"]["index"]
    assert index == str(shared / "index/index")
    assert flywheel["variables"]["seed"] == 3 and flywheel["variables"]["world"]["num_train"] == 70


def test_every_arm_changes_only_what_it_says(plan):
    recipe = plan.recipe
    own = recipe["stages"]["curriculum"]
    built = {
        name: jobs.build_arm(recipe, arm, num_questions=lambda: 160)["curriculum"] for name, arm in jobs.ARMS.items()
    }
    assert built["rl"] == own
    assert built["rl_from_prompted"] == {**own, "start": "stage:prompted"}
    assert built["rl_correctness"]["values"] == {**own["values"], "sigma": [0.0] * own["count"]}
    assert built["rl_random"]["stages"]["rl"]["total_steps"] == own["stages"]["rl"]["total_steps"]
    assert list(built["rl_random"]["stages"]) == ["selection", "rl"]


def test_the_longer_arm_makes_as_many_rollouts_as_pareto_sampling_in_all(plan):
    recipe = plan.recipe
    own = recipe["stages"]["curriculum"]["stages"]
    per_step = own["rl"]["algorithm"]["batch_size"] * own["rl"]["algorithm"]["group_size"]
    arm = jobs.build_arm(recipe, jobs.ARMS["rl_random_longer"], num_questions=lambda: 160)
    longer = arm["curriculum"]["stages"]["rl"]
    measured = 160 * own["pass_rate"]["num_runs"]
    assert longer["total_steps"] == own["rl"]["total_steps"] + round(measured / per_step)


def test_plain_rollouts_sample_as_many_tokens_as_the_flywheel(plan):
    folder = plan.job_folder("flywheel")
    write_done(folder, "flywheel", tokens=1050)
    rows = [{"iteration": 0, "tokens": 100}] * 4 + [{"iteration": 1, "tokens": 650}]
    (folder / "flywheel").mkdir()
    (folder / "flywheel" / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"stages": {"flywheel": {"num_rollouts": 2}}}
    assert plan.match_tokens(recipe) == 6  # 5.25 rollouts of 200 tokens, rounded up


@pytest.mark.parametrize(
    ("low", "high", "margin", "verdict"),
    [
        (0.01, 0.1, 0, "holds"),
        (-0.1, -0.01, 0, "does not hold"),
        (-0.1, 0.1, 0, "undecided"),
        (-0.01, 0.1, 0.02, "holds"),
    ],
)
def test_verdicts(low, high, margin, verdict):
    assert orderings.decide(low, high, margin=margin) == verdict


def test_orderings_are_paired_by_question():
    def model(*values: float | None) -> dict[str, list[float | None]]:
        return {"accuracy": list(values), "efficiency": list(values), "spread": list(values)}

    questions = {
        "0": {"rft": model(0.0, 0.5, None), "rl": model(0.5, 1.0, 1.0)},
        "1": {"rft": model(0.25, 0.25, 0.0), "rl": model(0.75, 0.75, 0.5)},
    }
    found = {(each["claim"], each["quantity"]): each for each in orderings.judge_orderings(questions)}
    above = found["RL above RFT", "accuracy"]
    assert above["difference"] == 0.5 and above["questions"] == 5 and above["verdict"] == "holds"
    assert above["seeds"] == above["seeds_with_claim"] == 2
    assert found["RL lowers the spread of rollouts", "spread"]["verdict"] == "does not hold"
    assert "| RL above RFT | accuracy | +0.500 (+0.500 to +0.500) | 2 of 2 | holds |" in orderings.format_orderings(
        found.values()
    )


def test_the_pipelines_of_all_jobs_can_be_written(plan):
    shared, rft = plan.job_folder("shared"), plan.job_folder("rft")
    write_done(shared, "prompted", model="prompted/model")
    write_done(rft, "rft", model="rft/model")
    skipped = {"seed3/rft_rollouts"}  # needs what the flywheel sampled
    for job in plan.list_jobs():
        if job.name not in skipped | {"seed3/rl_random_longer"}:
            assert "stage:index" not in yaml.safe_dump(job.build()) or job.name == "seed3/shared"
