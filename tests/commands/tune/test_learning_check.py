"""Steps that leave the weights unchanged are reported with their cause."""

from __future__ import annotations

import pytest

from small_runs import ask, build_small_run, list_apples, write_splits
from tunesmith import AlgorithmConfig, JudgeOutput, WorkflowOutput
from tunesmith.commands.tune.learning_check import UpdateLog, find_cause
from tunesmith.errors import ConfigError, RolloutError
from tunesmith.types import Group, Task, Trajectory

SUMMARY = "warning: no step changed the weights; the model is the one that the run started from"


async def judge_equally(task, response):
    return JudgeOutput(reward=0.5)


@pytest.fixture
def run(tmp_path, pocket_folder):
    """Calls tune() with small settings."""
    return build_small_run(tmp_path, pocket_folder, write_splits(tmp_path / "data", list_apples(6)))


def read_warnings(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]


def test_a_run_that_changes_the_weights_prints_no_warning(run, capsys):
    result = run()
    assert result.has_learned
    assert result.metrics["train/grad_norm"] > 0
    assert read_warnings(capsys) == []


def test_equal_rewards_are_reported_at_once_and_at_the_end(run, capsys):
    result = run(judge_func=judge_equally)
    first, last = read_warnings(capsys)
    assert first.startswith("warning: step 1 changed nothing: all rewards are 0.5, so all advantages are zero")
    assert last.startswith(f"{SUMMARY}: 2 x all rewards are 0.5")
    assert not result.has_learned


def test_equal_rewards_within_groups_are_distinguished_from_equal_rewards(run, capsys):
    async def judge(task, response):
        return JudgeOutput(reward=float(len(task["question"]) + int(task["question"].split()[2])))

    run(judge_func=judge)
    assert "the rewards within each group are equal, so" in read_warnings(capsys)[0]


def test_identical_rollouts_are_reported(run, capsys):
    async def greedy(task, model):
        completion = await model([{"role": "user", "content": task["question"]}], temperature=0)
        return WorkflowOutput(response=completion.choices[0].message.content)

    run(workflow_func=greedy)
    assert "sampled the same tokens; if the reward is not the highest one, raise" in read_warnings(capsys)[0]


@pytest.mark.parametrize("knob", ["model.temperature=0", "model.top_k=1"])
def test_greedy_rollouts_cannot_be_compared(run, knob):
    with pytest.raises(ConfigError, match=r"samples the same tokens in all rollouts .* raise model\."):
        run(knob)


def test_a_zero_gradient_is_reported(run, capsys):
    async def judge(task, response):
        return JudgeOutput(reward=0.0)

    result = run("algorithm.algorithm_type=reinforceplusplus", judge_func=judge)
    assert not result.has_learned
    assert any(SUMMARY in line for line in read_warnings(capsys))


def test_an_update_that_rounds_to_zero_is_reported(run, capsys):
    result = run("algorithm.batch_size=4", algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-15))
    assert result.checkpoint is not None
    first = read_warnings(capsys)[0]
    assert "step 1 changed nothing: the update rounds to zero at learning rate 1e-15" in first


@pytest.mark.parametrize(
    ("knob", "cause"),
    [
        ("trainer.learning_rate=1e-30", "learning rate 1e-30: raise trainer.learning_rate"),
        ("trainer.max_grad_norm=1e-30", "trainer.max_grad_norm=1e-30: raise it"),
    ],
)
def test_a_run_that_ends_with_the_weights_it_began_with_says_so(run, capsys, knob, cause):
    """Single updates are compared on every tenth step only, the weights of the last step with those of the first."""
    result = run(knob, "total_steps=3")
    assert result.num_steps == 3 and not result.has_learned
    assert read_warnings(capsys)[-1] == f"{SUMMARY}: 3 x the update rounds to zero at {cause}"


@pytest.mark.parametrize("knob", ["model.max_model_len=2", "engine.kv_cache_tokens=2"])
def test_lengths_too_small_for_any_prompt_are_refused(run, tmp_path, knob):
    with pytest.raises(ConfigError, match=r"=2 is too small for a reply.*the shortest prompt .* has \d+ tokens"):
        run(knob)
    assert not (tmp_path / "runs/AgentScope/x").exists()


def test_a_first_step_without_a_token_is_an_error(run):
    async def ask_at_length(task, model):
        return await ask({"question": "How many? " * 60}, model)

    with pytest.raises(RolloutError, match="rollouts failed"):
        run(workflow_func=ask_at_length)
    run()  # the failed run has removed its folder


def test_a_later_step_without_a_token_is_a_warning_also_where_a_run_resumes():
    nothing = {"train/num_updates": 0.0, "rollout/num_sampled_tokens": 0.0, "rollout/num_turns": 0.0}
    trained = {"train/num_updates": 1.0, "rollout/num_sampled_tokens": 9.0, "train/grad_norm": 1.0}
    whole, resumed = list[str](), list[str]()
    log = UpdateLog(whole.append)
    log.add(1, trained, [])
    log.add(2, nothing, [])
    UpdateLog(resumed.append).add(2, nothing, [])
    assert whole == resumed == ["warning: step 2 changed nothing: no rollout called the model"]
    with pytest.raises(RolloutError, match="step 1 sampled nothing to train on: no rollout called the model"):
        UpdateLog(resumed.append).add(1, nothing, [])
    with pytest.raises(RolloutError, match="no token was sampled because prompts fill the context"):
        UpdateLog(resumed.append).add(1, nothing | {"rollout/num_overlong": 8.0}, [])


def test_the_cause_follows_from_the_metrics_of_a_step():
    metrics = {
        "rollout/num_sampled_tokens": 8.0, "rollout/num_turns": 2.0,
        "rollout/reward_min": 0.0, "rollout/reward_max": 1.0,
        "train/num_updates": 0.0, "algorithm/num_trained_groups": 0.0, "algorithm/num_dropped_groups": 0.0,
    }  # fmt: skip
    task = Task(task_id="t", index=0, row={})
    scored = [Group(task=task, trajectories=(Trajectory(task=task, run_index=0, turns=(), reward=1.0),))]
    assert find_cause(metrics, []) == "no rollout has a reward"
    assert find_cause(metrics, scored) == "experience.operators removed every group that has a reward"
    assert "exclude every token" in find_cause(metrics | {"algorithm/num_trained_groups": 1.0}, scored)
    assert find_cause(metrics | {"train/num_updates": 1.0, "train/grad_norm": 0.0}, scored) == "the gradient is zero"
    assert find_cause(metrics | {"train/num_updates": 1.0, "train/grad_norm": 0.1}, scored) is None


def test_warnings_repeat_after_long_streaks_of_unchanged_steps():
    lines: list[str] = []
    log = UpdateLog(lines.append)
    unchanged = {"rollout/num_sampled_tokens": 8.0, "train/num_updates": 1.0, "train/grad_norm": 0.0}
    for step in range(1, 13):
        log.add(step, unchanged, [])
    log.add(13, unchanged | {"train/grad_norm": 1.0}, [])
    log.close()
    assert log.has_changed_weights
    assert [line.split(":")[1].strip() for line in lines] == [
        "step 1 changed nothing",
        "the last 10 steps changed nothing",
        "12 of 13 steps changed nothing",
    ]
