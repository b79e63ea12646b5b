"""Real runs, each made to fail in one way: the check of that way finds it, with its cause and the knob to change."""

from __future__ import annotations

import asyncio
import itertools
import re
import time

import openai
import pytest
from suggested_settings import check_settings

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput
from tunesmith.commands.doctor.record import load_record

ONE_TASK_DATA = '{"question": "Tom has 1 apple. How many?"}\n'


async def ask(task, model, **options):
    completion = await model([{"role": "user", "content": task["question"]}], **options)
    return WorkflowOutput(response=completion.choices[0].message.content)


def find(diagnosis, check):
    (finding,) = [each for each in diagnosis.findings if each.check == check]
    assert finding.problem and finding.change and finding.evidence
    check_settings(finding, load_record(diagnosis.folder).config)
    return finding


class SamplingTime:
    """Seconds from the first call of a run to its first reply, by which tools here are slow on any machine."""

    def __init__(self):
        self.started = self.seconds = None

    async def ask(self, task, model):
        self.started = time.monotonic() if self.started is None else self.started
        output = await ask(task, model)
        self.seconds = time.monotonic() - self.started if self.seconds is None else self.seconds
        return output


def write_evidence(finding):
    return "\n".join(map(str, finding.evidence))


async def judge_equally(task, response):
    return JudgeOutput(reward=0.5)


async def judge_task_only(task, response):
    return JudgeOutput(reward=float(int(task["question"].split()[2]) % 5))


@pytest.mark.parametrize(
    ("judge", "problem"),
    [(judge_equally, "every reward is 0.5, so the judge"), (judge_task_only, "rewarded equally, whatever they answer")],
)
def test_a_judge_without_variance(run, judge, problem):
    finding = find(run(judge_func=judge), "equal-rewards")
    assert finding.severity == "error" and "100% of the groups" in finding.problem
    assert problem in finding.problem
    assert "rollouts/: rewards of 8 equal groups" in write_evidence(finding)


def test_rollouts_that_are_identical(run):
    async def greedy(task, model):
        return await ask(task, model, temperature=0)

    finding = find(run(workflow_func=greedy, steps=1), "equal-rewards")
    assert "sample the same tokens" in finding.problem
    assert finding.settings["model.temperature"] > 1


@pytest.mark.parametrize(
    ("usual", "rare", "problem", "knob"),
    [
        (0.0, 1.0, "too hard", "algorithm.group_size"),
        (1.0, 0.0, "too easy", "train_dataset.task_selector.selector_type"),
    ],
)
def test_tasks_that_are_too_hard_or_too_easy(run, usual, rare, problem, knob):
    numbers = itertools.count(1)

    async def judge(task, response):
        return JudgeOutput(reward=rare if next(numbers) % 32 == 0 else usual)

    diagnosis = run(judge_func=judge, algorithm=AlgorithmConfig(group_size=4, batch_size=8, learning_rate=1e-4))
    finding = find(diagnosis, "equal-rewards")
    assert finding.severity == "warning" and problem in finding.problem and knob in finding.settings
    if problem == "too hard":
        assert find(diagnosis, "small-batch").settings["experience.refill_budget"] == 4


def test_responses_cut_off_at_max_tokens(run):
    finding = find(run(steps=1), "truncation")
    assert finding.settings == {"model.max_tokens": 24}
    assert "rollouts/step_000001.parquet: task train/" in write_evidence(finding)


def test_responses_cut_off_at_the_context(run, pocket_folder):
    model = TunerModelConfig(model_path=pocket_folder, max_model_len=40, max_tokens=39)
    finding = find(run(steps=1, model=model), "truncation")
    assert finding.severity == "error" and finding.settings == {"model.max_model_len": 80}


def test_prompts_that_do_not_fit(run):
    async def retry(task, model):
        with pytest.raises(openai.BadRequestError):
            await ask({"question": "How many? " * 60}, model)
        return await ask(task, model)

    finding = find(run(steps=1, workflow_func=retry), "refused-prompts")
    assert finding.settings == {"model.max_model_len": 256} and "16 of 32 calls" in write_evidence(finding)


def test_failures_by_cause(run):
    calls = itertools.count()

    async def workflow(task, model):
        output = await ask(task, model)
        if next(calls) % 4 == 0:
            raise RuntimeError("the tool broke")
        return output

    diagnosis = run(steps=1, workflow_func=workflow)
    finding = find(diagnosis, "failures")
    assert finding.severity == "warning" and "4 of 16 recent rollouts (25.0%) failed" in finding.problem
    assert "4 workflow" in write_evidence(finding)
    assert "4 x workflow: RuntimeError: the tool broke" in write_evidence(finding)
    assert "test_failing_runs.py:" in write_evidence(finding)


def test_a_run_that_stops_because_rollouts_fail(run):
    async def workflow(task, model):
        await ask(task, model)
        raise RuntimeError("the tool broke")

    diagnosis = run(workflow_func=workflow)
    assert diagnosis.state == "stopped"
    stopped, failures = diagnosis.findings[:2]
    assert (stopped.check, stopped.severity) == ("stopped", "error")
    assert "step 1 with a RolloutError" in stopped.problem and "16 of 16 rollouts failed" in write_evidence(stopped)
    assert (failures.check, failures.severity) == ("failures", "error")
    assert "16 of 16 recent rollouts (100.0%) failed" in failures.problem


def test_rollouts_that_time_out(run):
    async def workflow(task, model):
        output = await ask(task, model)
        if task["question"].startswith("Tom has 1"):
            await asyncio.sleep(60)
        return output

    finding = find(
        run("rollout.timeout_s=2", "rollout.max_failure_rate=1", steps=1, workflow_func=workflow), "failures"
    )
    assert "timeout" in finding.problem and finding.settings == {"rollout.timeout_s": 4.0}


def test_an_engine_without_requests_while_tools_run(run):
    async def workflow(task, model):
        output = await sampling.ask(task, model)
        await asyncio.sleep(max(1.0, 3 * sampling.seconds))
        return output

    sampling = SamplingTime()

    diagnosis = run(steps=1, workflow_func=workflow)
    finding = find(diagnosis, "idle-engine")
    assert finding.settings == {"algorithm.batch_size": 8}
    assert float(re.search(r"waiting for tools ([\d.]+) s", diagnosis.step_time)[1]) >= 1
    sampling = SamplingTime()
    limited = find(
        run("rollout.max_concurrency=8", experiment_name="y", steps=1, workflow_func=workflow), "idle-engine"
    )
    assert limited.settings == {"rollout.max_concurrency": 16}


def test_tools_that_block_the_event_loop(run):
    async def workflow(task, model):
        output = await sampling.ask(task, model)
        time.sleep(max(0.15, sampling.seconds / 2))  # noqa: ASYNC251
        return output

    sampling = SamplingTime()

    diagnosis = run(steps=1, workflow_func=workflow)
    assert "asyncio.to_thread" in find(diagnosis, "blocking-code").change
    assert "idle-engine" in {each.check for each in diagnosis.passed}


def test_rollouts_that_hold_up_a_step(run):
    calls = itertools.count()

    async def workflow(task, model):
        is_slow = next(calls) == 0
        output = await sampling.ask(task, model)
        await asyncio.sleep(max(4.0, 8 * sampling.seconds) if is_slow else 0)
        return output

    sampling = SamplingTime()

    finding = find(run(steps=1, workflow_func=workflow), "stragglers")
    assert "rollout.timeout_s" in finding.settings


def test_a_dead_learning_rate(run):
    diagnosis = run(algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-12))
    finding = find(diagnosis, "learning-rate")
    assert finding.severity == "error" and "too small to change the model" in finding.problem
    assert 1e-7 < finding.settings["trainer.learning_rate"] <= 1e-5
    assert "train/relative_update" in write_evidence(finding) and "at most 1e-12" in write_evidence(finding)


def test_a_dead_learning_rate_of_bfloat16_weights(run):
    diagnosis = run("model.dtype=bfloat16", algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-9))
    assert find(diagnosis, "learning-rate").severity == "error"


def test_a_learning_rate_that_destroys_the_model(run):
    """KL runs away and updates are too large; the few tasks are seen again and again."""
    algorithm = AlgorithmConfig(group_size=4, batch_size=4, learning_rate=0.03)
    diagnosis = run("algorithm.kl_coef=0.001", "trainer.num_minibatches=2", steps=6, algorithm=algorithm)
    kl = find(diagnosis, "kl")
    assert kl.settings["trainer.learning_rate"] == pytest.approx(0.003)
    assert kl.settings["algorithm.kl_coef"] == pytest.approx(0.01)
    assert find(diagnosis, "update-size").settings["trainer.num_minibatches"] == 1


def test_histories_that_are_edited(run):
    async def workflow(task, model):
        output = await ask(task, model)
        return await ask({"question": f"Answer again, {len(output.response)}: {task['question']}"}, model)

    finding = find(run(steps=1, workflow_func=workflow), "branches")
    assert "1 branches per trained rollout" in write_evidence(finding)


def test_calls_after_the_end_of_a_workflow(run):
    async def call_late(task, model, has_ended):
        await has_ended.wait()
        await ask(task, model)

    async def workflow(task, model):
        has_ended = asyncio.Event()
        late[task["question"]] = (has_ended, asyncio.create_task(call_late(task, model, has_ended)))
        return await ask(task, model)

    async def judge(task, response):
        has_ended, call = late[task["question"]]
        has_ended.set()
        await asyncio.wait({call})
        return JudgeOutput(reward=float(sum(map(ord, response)) % 7))

    late: dict[str, tuple[asyncio.Event, asyncio.Task]] = {}
    finding = find(run(steps=1, workflow_func=workflow, judge_func=judge), "late-calls")
    assert finding.severity == "note"


def test_a_cache_too_small_for_the_requests_in_flight(run):
    finding = find(run("engine.kv_cache_tokens=128", "engine.page_size=4", steps=1), "preemptions")
    assert finding.settings == {"engine.kv_cache_tokens": 256}


def test_clipped_gradients_and_few_tasks(run, tmp_path):
    (tmp_path / "few.jsonl").write_text(ONE_TASK_DATA)
    data = DatasetConfig(path=str(tmp_path / "few.jsonl"), total_steps=6)
    diagnosis = run("trainer.max_grad_norm=0.01", train_dataset=data)
    assert find(diagnosis, "gradients").settings["trainer.max_grad_norm"] > 0.05
    assert "about 1 different tasks, visited 24 times each" in find(diagnosis, "task-pool").problem


async def judge_opposite_skills(task, response):
    """Training rewards lower-case letters, which evaluation punishes."""
    share = sum(char.islower() for char in response) / max(len(response), 1)
    return JudgeOutput(reward=share if "is_held_out" not in task else 1 - share)


def test_a_held_out_reward_that_falls_while_training_rises(run, tmp_path):
    rows = [f'{{"question": "Tom has {n} apples. How many?", "is_held_out": true}}\n' for n in range(30)]
    (tmp_path / "held_out.jsonl").write_text("".join(rows))
    diagnosis = run(
        "evaluation.at_start=true",
        "evaluation.interval_steps=6",
        steps=12,
        judge_func=judge_opposite_skills,
        eval_dataset=DatasetConfig(path=str(tmp_path / "held_out.jsonl")),
        algorithm=AlgorithmConfig(group_size=8, batch_size=4, learning_rate=3e-3),
    )
    finding = find(diagnosis, "evaluation")
    assert finding.severity == "warning" and "fell significantly after step 0" in finding.problem
    assert "while the training reward rose" in finding.problem
    assert "eval/step_000012.json" in write_evidence(finding)


def test_a_held_out_reward_without_significant_gain(run, tmp_path):
    diagnosis = run(
        "evaluation.at_start=true", steps=1, eval_dataset=DatasetConfig(path=str(tmp_path / "data/test.jsonl"))
    )
    finding = find(diagnosis, "evaluation")
    assert finding.severity == "note" and finding.settings == {"evaluation.num_samples": 4}
    assert find(diagnosis, "evaluation-time").settings == {"evaluation.interval_steps": 400}


def test_an_entropy_that_collapses_before_the_tasks_are_solved(run):
    numbers = itertools.count(1)

    async def judge(task, response):
        """Half of the reward is for lower-case letters; the other half is almost never given."""
        share = sum(char.islower() for char in response) / max(len(response), 1)
        return JudgeOutput(reward=share / 2 + (next(numbers) % 50 == 0) / 2)

    algorithm = AlgorithmConfig(group_size=8, batch_size=4, learning_rate=1e-2)
    finding = find(run(steps=20, judge_func=judge, algorithm=algorithm), "entropy")
    assert "entropy has collapsed" in finding.problem and "algorithm.entropy_coef" in finding.settings
