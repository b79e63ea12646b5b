"""Runs of the pocket model, each made to fail in one way: the check of that way finds it, with its cause and the knob.

The folders are kept in `failing_runs`, written by `write_failing_runs.py`; one run is made here to compare with.
"""

from __future__ import annotations

import re

import pytest
from suggested_settings import check_settings
from write_failing_runs import FAILING_RUNS, RUNS, Start, keep_run, one_rollout_of_four_fails

from tunesmith.commands.doctor.diagnose import diagnose
from tunesmith.commands.doctor.record import open_run


def find(name, check):
    """The finding of a check on a kept run; its suggested settings are valid for the run's config."""
    diagnosis = diagnose(FAILING_RUNS / name)
    (finding,) = [each for each in diagnosis.findings if each.check == check]
    assert finding.problem and finding.change and finding.evidence
    check_settings(finding, open_run(diagnosis.folder).config)
    return finding


def write_evidence(finding):
    return "\n".join(map(str, finding.evidence))


def test_every_kept_run_has_the_function_that_writes_it():
    assert sorted(path.name for path in FAILING_RUNS.iterdir()) == sorted(run.__name__ for run in RUNS)


def test_a_kept_run_has_the_diagnosis_of_the_run_itself(tmp_path, pocket_folder):
    run = Start(tmp_path, pocket_folder, "one_rollout_of_four_fails")
    one_rollout_of_four_fails(run)
    keep_run(run, tmp_path / "kept" / run.name)
    real, kept = diagnose(run.root), diagnose(tmp_path / "kept" / run.name)
    assert [str(each) for each in kept.findings] == [str(each) for each in real.findings]
    assert (kept.state, kept.num_steps, kept.not_checked) == (real.state, real.num_steps, real.not_checked)
    committed = diagnose(FAILING_RUNS / run.name)
    assert {each.check for each in committed.findings} == {each.check for each in real.findings}
    assert (committed.state, committed.num_steps) == ("finished", 1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("judge_returns_one_value", "every reward is 0.5, so the judge"),
        ("judge_ignores_the_response", "rewarded equally, whatever they answer"),
    ],
)
def test_a_judge_without_variance(name, problem):
    finding = find(name, "equal-rewards")
    assert finding.severity == "error" and "100% of the groups" in finding.problem
    assert problem in finding.problem
    assert "rollouts/: rewards of 8 equal groups" in write_evidence(finding)


def test_rollouts_that_are_identical():
    finding = find("identical_rollouts", "equal-rewards")
    assert "sample the same tokens" in finding.problem
    assert finding.settings["model.temperature"] > 1


@pytest.mark.parametrize(
    ("name", "problem", "knob"),
    [
        ("tasks_too_hard", "too hard", "algorithm.group_size"),
        ("tasks_too_easy", "too easy", "train_dataset.task_selector.selector_type"),
    ],
)
def test_tasks_that_are_too_hard_or_too_easy(name, problem, knob):
    finding = find(name, "equal-rewards")
    assert finding.severity == "warning" and problem in finding.problem and knob in finding.settings


def test_responses_cut_off_at_max_tokens():
    finding = find("cut_off_at_max_tokens", "truncation")
    assert finding.settings == {"model.max_tokens": 24}
    assert "rollouts/step_000001.parquet: task train/" in write_evidence(finding)


def test_responses_cut_off_at_the_context():
    finding = find("cut_off_at_the_context", "truncation")
    assert finding.severity == "error" and finding.settings == {"model.max_model_len": 80}


def test_prompts_that_do_not_fit():
    finding = find("prompts_that_do_not_fit", "refused-prompts")
    assert finding.settings == {"model.max_model_len": 256} and "16 of 32 calls" in write_evidence(finding)


def test_failures_by_cause():
    finding = find("one_rollout_of_four_fails", "failures")
    assert finding.severity == "warning" and "4 of 16 recent rollouts (25.0%) failed" in finding.problem
    assert "4 workflow" in write_evidence(finding)
    assert "4 x workflow: RuntimeError: the tool broke" in write_evidence(finding)
    assert "write_failing_runs.py:" in write_evidence(finding)


def test_a_run_that_stops_because_rollouts_fail():
    diagnosis = diagnose(FAILING_RUNS / "all_rollouts_fail")
    assert diagnosis.state == "failed"
    stopped, failures = diagnosis.findings[:2]
    assert (stopped.check, stopped.severity) == ("stopped", "error")
    assert "step 1 with a RolloutError" in stopped.problem and "16 of 16 rollouts failed" in write_evidence(stopped)
    assert (failures.check, failures.severity) == ("failures", "error")
    assert "16 of 16 recent rollouts (100.0%) failed" in failures.problem


def test_rollouts_that_time_out():
    finding = find("rollouts_time_out", "failures")
    assert "timeout" in finding.problem and finding.settings == {"rollout.timeout_s": 4.0}


def test_an_engine_without_requests_while_tools_run():
    assert find("slow_tools", "idle-engine").settings == {"algorithm.batch_size": 8}
    step_time = diagnose(FAILING_RUNS / "slow_tools").step_time
    assert float(re.search(r"waiting for tools ([\d.]+) s", step_time)[1]) >= 1
    assert find("slow_tools_of_few_rollouts", "idle-engine").settings == {"rollout.max_concurrency": 16}


def test_tools_that_block_the_event_loop_are_no_wait_of_the_engine():
    assert "idle-engine" in {each.check for each in diagnose(FAILING_RUNS / "tools_that_block").passed}


def test_a_dead_learning_rate():
    finding = find("dead_learning_rate", "learning-rate")
    assert finding.severity == "error" and "too small to change the model" in finding.problem
    assert 1e-7 < finding.settings["trainer.learning_rate"] <= 1e-5
    assert "train/relative_update" in write_evidence(finding) and "at most 1e-12" in write_evidence(finding)


def test_a_dead_learning_rate_of_bfloat16_weights():
    assert find("dead_learning_rate_of_bfloat16", "learning-rate").severity == "error"


def test_a_learning_rate_that_destroys_the_model():
    kl = find("destructive_learning_rate", "kl")
    assert kl.settings["trainer.learning_rate"] == pytest.approx(0.003)
    assert kl.settings["algorithm.kl_coef"] == pytest.approx(0.01)


def test_a_held_out_reward_that_falls_while_training_rises():
    finding = find("overfitting", "evaluation")
    assert finding.severity == "warning" and "fell significantly after step 0" in finding.problem
    assert "while the training reward rose" in finding.problem
    assert "eval/step_000012.json" in write_evidence(finding)


def test_a_held_out_reward_without_significant_gain():
    finding = find("held_out_reward_without_gain", "evaluation")
    assert finding.severity == "note" and finding.settings == {"evaluation.num_samples": 4}


def test_an_entropy_that_collapses_before_the_tasks_are_solved():
    finding = find("entropy_collapse", "entropy")
    assert "entropy has collapsed" in finding.problem and "algorithm.entropy_coef" in finding.settings
