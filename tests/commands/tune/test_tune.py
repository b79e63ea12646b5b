"""`tune()` end to end on the untrained pocket model: settings, failures, and files on disk."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import openai
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

from small_runs import ask, build_small_run, list_apples, write_splits
from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput
from tunesmith.commands.stage import explain_device
from tunesmith.engine.event_loop import shutdown as leftovers
from tunesmith.errors import ConfigError, DataError, RolloutError
from tunesmith.experience.store import load_rollouts
from tunesmith.monitor.console import LINE_PARTS


@pytest.fixture
def data(tmp_path):
    return write_splits(tmp_path / "data", list_apples(6))


@pytest.fixture
def run(tmp_path, data, pocket_folder):
    """Calls tune() with small settings; arguments and overrides may be given."""
    return build_small_run(tmp_path, pocket_folder, data, steps=1, max_tokens=6)


def read_metrics(result):
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_what_it_trains_where_and_how_to_look_at_it(run, capsys):
    result = run()
    printed = capsys.readouterr().err
    (model,) = (line for line in printed.splitlines() if line.startswith("model "))
    (step,) = (line for line in printed.splitlines() if line.startswith("step 1/1"))
    num_parameters = sum(each.size for each in load_file(result.checkpoint / "model.safetensors").values())
    number = f"{num_parameters:,}" if num_parameters < 1e6 else f"{num_parameters / 1e6:.1f} M"
    assert f"{number} parameters, float32" in model
    assert "trains  all weights" in printed and "device  cpu, as model.device=cpu says" in printed
    assert f"tunesmith view {result.folder}" in printed and "Generating" not in printed
    assert len(step) <= 80 and " useful " in step and " trunc " in step and "mismatch" not in step


@pytest.mark.skipif(torch.cuda.is_available() or torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_cpu_build_of_torch_beside_a_gpu_is_said_aloud(tmp_path, monkeypatch):
    assert explain_device(torch.device("cpu"), "auto") == "cpu, because torch finds no GPU"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "this torch is a CPU build; this machine has an NVIDIA GPU" in explain_device(torch.device("cpu"), "auto")


def read_turns(result, step=1):
    groups = load_rollouts(result.folder / f"rollouts/step_{step:06d}.parquet")
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


def test_a_run_writes_its_documented_files(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = run(eval_dataset=DatasetConfig(path=str(tmp_path / "data"), split="test"), project_name="p")
    assert result.folder == tmp_path / "runs/p/x"
    assert result.checkpoint == result.folder / "global_step_1"
    AutoModelForCausalLM.from_pretrained(result.checkpoint)
    AutoTokenizer.from_pretrained(result.checkpoint)
    assert (result.folder / "config.yaml").exists()
    assert list((result.folder / "monitor/tensorboard").iterdir())
    rows = read_metrics(result)
    assert [(row["step"], row["kind"]) for row in rows] == [(1, "train"), (1, "eval")]
    assert rows[0]["rollout/reward_mean"] == result.metrics["rollout/reward_mean"]
    assert rows[1]["eval/eval_taskset/reward"] == result.evaluations["eval_taskset"].mean
    details = json.loads((result.folder / "eval/step_000001.json").read_text())
    assert len(details["eval_taskset"]["tasks"]) == 6
    assert result.metrics["mismatch/max_log_ratio"] < 1e-4
    assert {name for names, _ in LINE_PARTS for name in names} <= result.metrics.keys()


def test_sampling_settings_are_applied(run, pocket_folder):
    model = TunerModelConfig(model_path=pocket_folder, max_model_len=128, max_tokens=3, temperature=0.7, top_p=0.8)
    turns = read_turns(run(model=model))
    assert {(turn.distribution.temperature, turn.distribution.top_p) for turn in turns} == {(0.7, 0.8)}
    assert max(len(turn.sampled_ids) for turn in turns) == 3


def test_without_a_judge_the_workflow_gives_the_reward(run):
    async def workflow(task, model):
        output = await ask(task, model)
        return WorkflowOutput(reward=float(len(output.response)), metrics={"half": 0.5})

    result = run(workflow_func=workflow, judge_func=None)
    assert result.metrics["rollout/reward_max"] > 0
    assert result.metrics["rollout/half/mean"] == 0.5


def test_failed_rollouts_are_counted_and_have_no_reward(run):
    async def workflow(task, model, logger):
        output = await ask(task, model)
        if task["question"].startswith("Tom has 0"):
            raise RuntimeError("the tool broke")
        return output

    result = run(
        workflow_func=workflow,
        algorithm=AlgorithmConfig(group_size=2, batch_size=6, learning_rate=1e-3),
    )
    assert result.metrics["rollout/num_failed_workflow"] == 2
    assert result.metrics["rollout/num_trajectories"] == 12
    groups = load_rollouts(result.folder / "rollouts/step_000001.parquet")
    failed = [t for g in groups for t in g.trajectories if t.failure is not None]
    assert [t.failure.message for t in failed] == ["RuntimeError: the tool broke"] * 2
    assert all(t.reward is None for t in failed)


def test_a_run_in_which_most_rollouts_fail_raises_and_names_the_cause(run):
    async def workflow(task, model):
        return WorkflowOutput(response=task["no_such_field"])

    with pytest.raises(RolloutError, match=r"no_such_field.*fields of the task: question, answer"):
        run(workflow_func=workflow)


def test_failures_are_printed_with_their_line_and_saved_even_if_the_run_stops(run, tmp_path, capsys):
    def use_the_tool(number):
        raise RuntimeError(f"the tool broke\nover {number}")

    async def workflow(task, model):
        output = await ask(task, model)
        if task["answer"] in broken:
            use_the_tool(task["answer"])
        return WorkflowOutput(response=output.response, metrics={"length": 2.5})

    broken = "0"
    one_of_six = AlgorithmConfig(group_size=2, batch_size=6, learning_rate=1e-3)
    run("monitor.console_metrics=[rollout/*/mean,rollout/none]", workflow_func=workflow, algorithm=one_of_six)
    told = capsys.readouterr().err
    assert "failed: 2 x workflow: RuntimeError: the tool broke over 0" in told
    assert "test_tune.py:" in told and "in use_the_tool" in told
    assert "length/mean 2.5" in told and "none -" in told
    broken = "0123"
    with pytest.raises(RolloutError, match=r"8 x workflow: RuntimeError: the tool broke over \d \(.*in use_the_tool\)"):
        run(workflow_func=workflow, algorithm=one_of_six, experiment_name="y")
    groups = load_rollouts(tmp_path / "runs/AgentScope/y/rollouts/step_000001.parquet")
    failures = [t.failure for g in groups for t in g.trajectories if t.failure is not None]
    assert len(failures) == 8 and sum(len(group.trajectories) for group in groups) == 12
    assert {failure.message for failure in failures} >= {"RuntimeError: the tool broke\nover 0"}
    assert failures[0].line.endswith("in use_the_tool")
    assert (tmp_path / "runs/AgentScope/y/tokenizer/tokenizer.json").is_file(), "rollouts without a checkpoint are read"


async def ask_without_gradients(task, model):
    with torch.no_grad():
        return await ask(task, model)


async def ask_in_inference_mode(task, model):
    with torch.inference_mode():
        return await ask(task, model)


async def switch_gradients_off(task, model):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return await ask(task, model)


async def switch_gradients_off_in_a_task(task, model):
    async def switch():
        torch.set_grad_enabled(False)
        return await ask(task, model)

    return await asyncio.create_task(switch())


@pytest.mark.parametrize(
    "workflow",
    [ask_without_gradients, ask_in_inference_mode, switch_gradients_off, switch_gradients_off_in_a_task],
)
def test_torch_modes_set_by_user_code_do_not_affect_training(run, workflow):
    expected = run(experiment_name="plain")
    found = run(workflow_func=workflow)
    assert expected.metrics["train/grad_norm"] > 0
    assert found.metrics["train/grad_norm"] == expected.metrics["train/grad_norm"]
    weights = [load_file(result.checkpoint / "model.safetensors") for result in (expected, found)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


def test_a_run_returns_while_a_user_thread_is_running(run, caplog, monkeypatch):
    monkeypatch.setattr(leftovers, "GRACE_S", 0.1)
    release = threading.Event()

    async def workflow(task, model):
        asyncio.get_running_loop().run_in_executor(None, release.wait, 300)
        return await ask(task, model)

    assert run(workflow_func=workflow).checkpoint is not None
    release.set()
    assert "user code still runs" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_advice_on_resuming(run, data, capsys, number):
    async def workflow(task, model):
        if due:
            os.kill(os.getpid(), due.pop())
        return await ask(task, model)

    due = []
    run(workflow_func=workflow)
    due.append(number)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        longer = DatasetConfig(path=data, total_steps=3)
        run(workflow_func=workflow, train_dataset=longer, continue_from_checkpoint=True)
    advice = r"the last checkpoint is .*global_step_2: to resume from it, repeat the command$"
    assert re.search(advice, capsys.readouterr().err, re.MULTILINE)


def test_a_signal_in_the_last_step_does_not_advise_to_resume(run, capsys):
    async def workflow(task, model):
        if due:
            os.kill(os.getpid(), due.pop())
        return await ask(task, model)

    due = [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        run(workflow_func=workflow)
    said = capsys.readouterr().err
    assert "--resume" not in said
    assert re.search(r"the run is done, and its model is .*global_step_1", said)


def test_a_workflow_that_hangs_ends_at_its_deadline(run):
    async def workflow(task, model):
        await asyncio.sleep(3600)

    with pytest.raises(RolloutError, match=r"timeout_s=0\.2"):
        run("rollout.timeout_s=0.2", workflow_func=workflow)


async def chat_on(task, model):
    """Call the model until the prompt no longer fits the context."""
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(20):
        completion = await model(messages)
        messages += [
            {"role": "assistant", "content": completion.choices[0].message.content or ""},
            {"role": "user", "content": "Go on."},
        ]
    raise AssertionError("a context of 64 tokens held 20 turns")


def test_a_full_context_ends_the_turn_but_not_the_run(run, pocket_folder):
    async def chatter(task, model):
        with pytest.raises(openai.BadRequestError) as caught:
            await chat_on(task, model)
        assert caught.value.code == "context_length_exceeded"
        return WorkflowOutput(response="done", reward=float(len(task["question"]) % 2))

    model = TunerModelConfig(model_path=pocket_folder, max_model_len=64, max_tokens=30)
    result = run(workflow_func=chatter, judge_func=None, model=model)
    assert result.metrics["rollout/num_failed"] == 0
    assert result.metrics["rollout/num_stop_context"] > 0
    assert result.metrics["rollout/num_overlong"] == 8


def test_calling_the_model_with_a_full_context_is_a_failure(run, pocket_folder):
    model = TunerModelConfig(model_path=pocket_folder, max_model_len=64, max_tokens=30)
    with pytest.raises(RolloutError, match=r"maximum context length is 64 tokens.* raise model\.max_model_len"):
        run(workflow_func=chat_on, judge_func=None, model=model)


def test_a_local_auxiliary_model_helps_and_is_not_trained(run, pocket_folder):
    seen = []

    async def judge(task, response, auxiliary_models):
        completion = await auxiliary_models["auxiliary"]([{"role": "user", "content": response or "?"}], max_tokens=4)
        seen.append(completion.choices[0].message.content)
        return JudgeOutput(reward=float(sum(map(ord, response)) % 7))

    auxiliary = TunerModelConfig(model_path=pocket_folder, max_model_len=128, temperature=0.5)
    result = run(judge_func=judge, auxiliary_models={"auxiliary": auxiliary})
    assert len(seen) == 8
    assert len(read_turns(result)) == 8


def test_a_workflow_may_be_a_partial_a_method_or_an_object(run):
    class Asker:
        async def method(self, task, model, suffix):
            return await ask({"question": task["question"] + suffix}, model)

        async def __call__(self, task, model):
            return await ask(task, model)

    for number, workflow in enumerate((functools.partial(Asker().method, suffix=" Say it."), Asker())):
        result = run(workflow_func=workflow, experiment_name=f"x{number}")
        assert result.metrics["rollout/num_failed"] == 0


def test_the_repr_of_a_result_is_short(run, data):
    result = run(eval_dataset=DatasetConfig(path=data, split="test"))
    assert len(str(result)) < 1000
    shown = " ".join(str(result).split())
    groups = result.evaluations["eval_taskset"].groups
    rewards = [run.reward for group in groups for run in group.trajectories]
    assert len(groups) == 6
    assert "steps 1 " in shown and f"eval eval_taskset reward {sum(rewards) / len(rewards):.4g} (" in shown


def test_an_error_of_tune_has_no_other_error_before_it(run):
    with pytest.raises(DataError) as caught:
        run(train_dataset=DatasetConfig(path="/no/such/folder"))
    assert caught.value.__context__ is None


def test_tune_works_where_an_event_loop_is_running(run):
    async def main():
        return run()

    assert asyncio.run(main()).num_steps == 1


def test_kl_keeps_a_reference_model_and_reports_zero_before_the_first_update(run):
    result = run("algorithm.kl_coef=0.1")
    assert result.metrics["train/kl"] == pytest.approx(0.0, abs=1e-9)


def test_replayed_groups_are_corrected_and_excluded_from_the_mismatch_check(run, data):
    """Groups replayed in step 2 are off-policy; those of the newest policy version still match."""
    overrides = ("experience.replay.num_groups=2", "trainer.learning_rate=0.03", "trainer.mismatch_stop=1e-3")
    result = run(*overrides, train_dataset=DatasetConfig(path=data, total_steps=2))
    first, second = read_metrics(result)
    assert "correction/mean_weight" not in first
    assert second["experience/num_replayed_groups"] == 2
    assert second["correction/mean_weight"] != 1 and second["correction/truncated_frac"] > 0
    assert second["mismatch/max_log_ratio"] < 1e-4


def test_advantages_may_differ_between_turns(run):
    async def workflow(task, model):
        first = await ask(task, model)
        return await ask({"question": f"{task['question']} {first.response}"}, model)

    result = run(workflow_func=workflow, algorithm=AlgorithmConfig(algorithm_type="gigpo", group_size=4, batch_size=2))
    assert result.metrics["train/num_updates"] == 1
    rows = pq.read_table(result.folder / "rollouts/step_000001.parquet").to_pylist()
    advantages = [row["turn_advantages"] for row in rows]
    assert all(len(row) == 2 for row in advantages) and any(first != second for first, second in advantages)


def test_a_used_name_is_refused_unless_the_run_is_resumed(run, data):
    first = run()
    with pytest.raises(ConfigError, match="continue_from_checkpoint"):
        run()
    longer = run(train_dataset=DatasetConfig(path=data, total_steps=2), continue_from_checkpoint=True)
    assert longer.num_steps == 2
    assert [row["step"] for row in read_metrics(longer)] == [1, 2]
    assert longer.folder == first.folder


def test_the_run_folder_is_created_at_the_configured_path(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("checkpoint_root_dir=./checkpoints", experiment_name=None)
    assert result.folder.parent == Path(tmp_path / "checkpoints/AgentScope")
    assert result.folder.name.startswith("Experiment-20")


AGENT_ELSEWHERE = """
import json, sys, urllib.request
base_url, api_key, model, question = sys.argv[1:]
body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]}).encode()
headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or "")
"""


def test_an_agent_in_another_process_is_recorded_over_http(run):
    async def workflow(task, model):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT_ELSEWHERE, model.base_url, model.api_key, model.model_name, task["question"],
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0
        return WorkflowOutput(response=output.decode())

    result = run("rollout.http_port=0", workflow_func=workflow)
    assert result.metrics["rollout/num_failed"] == 0
    assert len(read_turns(result)) == 8
    assert all(turn.sampled_ids for turn in read_turns(result))
