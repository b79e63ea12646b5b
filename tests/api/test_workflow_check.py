"""`tunesmith.check`: one workflow for each problem that it finds, on the untrained pocket model."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import openai
import pytest
from typer.testing import CliRunner

from tunesmith import JudgeOutput, WorkflowOutput, check
from tunesmith.cli import app
from tunesmith.errors import ConfigError

TASK = {"question": "What is 2 + 3?"}
NUMBERS = itertools.count()


async def ask(model, messages, **options):
    client = model.as_openai_client()
    completion = await client.chat.completions.create(model=model.model_name, messages=messages, **options)
    return completion.choices[0].message.model_dump(exclude_none=True)


def ask_user(text="hi"):
    return {"role": "user", "content": text}


async def append_only(task, model):
    messages = [ask_user(task["question"])]
    messages.append(await ask(model, messages))
    messages.append(ask_user("Are you sure?"))
    return WorkflowOutput(reward=0.5, response=str(await ask(model, messages)), metrics={"calls": 2.0})


def run(workflow, pocket_folder, **options):
    """The result, and its findings by name without that of `max_tokens`, at which the pocket model ends."""
    overrides = ["model.max_model_len=256", "model.max_tokens=6", "model.device=cpu", "rollout.chat_model=openai"]
    result = check(workflow, task=TASK, model=pocket_folder, overrides=overrides, **options)
    return result, {finding.check: finding for finding in result.findings if finding.check != "truncation"}


def test_a_workflow_that_appends_has_one_sample_and_no_finding(pocket_folder):
    result, found = run(append_only, pocket_folder)
    assert found == {}
    (sample,) = result.samples
    assert [span.is_sampled for span in sample.spans] == [False, True, False, True]
    assert sample.num_sampled_tokens == 12
    assert (result.reward, result.metrics, result.num_turns) == (0.5, {"calls": 2.0}, 2)
    assert "What is 2 + 3?" in str(result)
    assert "tokens that would be trained: 12" in str(result)


def test_auxiliary_models_are_served_as_in_a_run(pocket_folder):
    async def workflow(task, model, auxiliary_models):
        assert auxiliary_models["critic"].base_url != model.base_url
        await ask(auxiliary_models["critic"], [ask_user()])
        await ask(model, [ask_user()])
        return WorkflowOutput(reward=1.0)

    overrides = [
        "model.max_model_len=256", "model.max_tokens=6", "model.device=cpu", "rollout.chat_model=openai",
        "rollout.http_port=0", f"auxiliary_models.critic.path={pocket_folder}",
    ]  # fmt: skip
    assert check(workflow, task=TASK, model=pocket_folder, overrides=overrides).reward == 1.0


def test_incomplete_replies_are_found(pocket_folder):
    result, _ = run(append_only, pocket_folder)
    (finding,) = result.findings
    assert finding.check == "truncation"
    assert [each.observed for each in finding.evidence] == ["6 tokens, ended by length"] * 2
    assert "model.max_tokens" in finding.change


def test_an_edited_reply_is_a_branch_that_names_the_message(pocket_folder):
    async def workflow(task, model):
        reply = await ask(model, [ask_user()])
        edited = {"role": "assistant", "content": "EDITED " + reply["content"]}
        await ask(model, [ask_user(), edited, ask_user("again")])
        return WorkflowOutput(reward=1.0)

    result, found = run(workflow, pocket_folder)
    assert list(found) == ["branches"]
    (evidence,) = found["branches"].evidence
    assert evidence.source == "call 2"
    assert "message 2 (assistant) differs from that of call 1" in evidence.observed
    assert "EDITED" in evidence.observed
    assert len(result.samples) == 2


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ([ask_user("one"), ask_user("two")], "repeats that of call 1"),
        ([ask_user("one")], "goes back to the first 1 messages of that of call 1"),
        ([ask_user("other")], "message 1 (user) differs from that of call 1"),
    ],
)
def test_the_kind_of_a_branch_is_named(pocket_folder, second, reason):
    async def workflow(task, model):
        await ask(model, [ask_user("one"), ask_user("two")])
        await ask(model, second)
        return WorkflowOutput(reward=1.0)

    _, found = run(workflow, pocket_folder)
    assert reason in found["branches"].evidence[0].observed


def test_an_unseeded_number_in_a_prompt_is_found(pocket_folder):
    async def workflow(task, model):
        await ask(model, [ask_user("hi"), ask_user(f"id {next(NUMBERS)}")])
        return WorkflowOutput(reward=1.0)

    _, found = run(workflow, pocket_folder)
    assert list(found) == ["repetition"]
    assert "call 1 has another prompt" in found["repetition"].problem
    assert found["repetition"].evidence[0].observed.startswith("message 2: first run 'user: id ")


def test_an_unseeded_judge_is_found(pocket_folder):
    async def judge(task, response):
        return JudgeOutput(reward=float(next(NUMBERS)))

    _, found = run(append_only, pocket_folder, judge=judge)
    assert list(found) == ["repetition"]
    assert "the reward differs" in found["repetition"].problem


def test_code_that_blocks_the_loop_is_found_with_its_line(pocket_folder):
    async def workflow(task, model):
        time.sleep(0.7)  # noqa: ASYNC251 - the defect
        await ask(model, [ask_user()])
        return WorkflowOutput(reward=1.0)

    _, found = run(workflow, pocket_folder)
    assert list(found) == ["blocking-code"]
    assert "test_workflow_check.py" in found["blocking-code"].evidence[0].source


def test_a_stall_of_one_run_is_no_blocking_code(pocket_folder):
    """Of the machine, or of a library that imports modules at its first call."""
    stalls = [0.4]

    async def workflow(task, model):
        time.sleep(stalls.pop() if stalls else 0)  # noqa: ASYNC251
        await ask(model, [ask_user()])
        return WorkflowOutput(reward=1.0)

    assert run(workflow, pocket_folder)[1] == {} and not stalls


@pytest.mark.parametrize(
    ("output", "judge_reward", "change"),
    [
        (WorkflowOutput(response="a"), "no judge", "name a judge"),
        (WorkflowOutput(response="a"), None, "return a number from the judge"),
        ("text", "no judge", "fix this line"),
    ],
)
def test_a_missing_reward_says_that_nothing_is_trained(pocket_folder, output, judge_reward, change):
    async def workflow(task, model):
        await ask(model, [ask_user()])
        return output

    async def judge(task, response):
        return JudgeOutput(reward=judge_reward)

    result, found = run(workflow, pocket_folder, judge=None if judge_reward == "no judge" else judge)
    assert list(found) == ["no-reward"]
    assert found["no-reward"].severity == "error"
    assert change in found["no-reward"].change
    assert result.reward is None
    assert "tokens that would be trained: 0" in str(result)


def test_refused_calls_are_found_also_if_the_workflow_catches_them(pocket_folder):
    async def workflow(task, model):
        with pytest.raises(openai.BadRequestError):
            await ask(model, [ask_user()], temperature=-1)
        await ask(model, [ask_user()])
        return WorkflowOutput(reward=1.0)

    _, found = run(workflow, pocket_folder)
    assert list(found) == ["refused-calls"]
    assert "temperature" in found["refused-calls"].evidence[0].observed


def test_late_calls_are_found(pocket_folder):
    async def call_later(model):
        await asyncio.sleep(0)
        await ask(model, [ask_user("late")])

    tasks = []

    async def workflow(task, model):
        await ask(model, [ask_user()])
        tasks.append(asyncio.ensure_future(call_later(model)))
        return WorkflowOutput(reward=1.0)

    _, found = run(workflow, pocket_folder)
    assert list(found) == ["late-calls"]
    assert [type(task.exception()) for task in tasks] == [openai.AuthenticationError] * 2


def test_the_command_reads_a_run_file_and_prints_json(pocket_folder, tmp_path):
    (tmp_path / "agent.py").write_text(
        "from tunesmith import WorkflowOutput\n"
        "async def workflow(task, model):\n"
        "    await model([{'role': 'user', 'content': task['question']}])\n"
        "    return WorkflowOutput(reward=2.0)\n"
    )
    (tmp_path / "train.jsonl").write_text('{"question": "first"}\n{"question": "second"}\n')
    (tmp_path / "run.yaml").write_text(
        f"workflow: {tmp_path}/agent.py:workflow\ntrain_dataset: {{path: {tmp_path}/train.jsonl}}\n"
        f"model: {{path: {pocket_folder}, max_model_len: 256, max_tokens: 6, device: cpu}}\n"
        "rollout: {chat_model: openai}\n"
    )
    done = CliRunner().invoke(app, ["check", str(tmp_path / "run.yaml"), "--task", "1", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["task_id"], result["reward"]) == ("train/1", 2.0)
    assert "second" in result["samples"][0]["spans"][0]["text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "--model"),
        ({"task": 0}, "--data"),
    ],
)
def test_what_is_missing_is_named(pocket_folder, options, message):
    with pytest.raises(ConfigError, match=message):
        check(append_only, **{"model": pocket_folder, "task": TASK} | options)


def test_a_task_must_be_a_row_or_an_object(pocket_folder):
    done = CliRunner().invoke(app, ["check", "agent.py:workflow", "--task", "first", "--model", pocket_folder])
    assert done.exit_code == 1
    assert "--task='first' must be the number of a row" in done.stderr


def test_a_file_alone_names_its_function_workflow(pocket_folder, tmp_path):
    lines = (
        "from tunesmith import WorkflowOutput",
        "def workflow(task, model):",
        "    client = model.as_sync_openai_client()",
        "    messages = [{'role': 'user', 'content': task['question']}]",
        "    client.chat.completions.create(model=model.model_name, messages=messages, max_tokens=2)",
        "    return WorkflowOutput(reward=0.25)",
    )
    (tmp_path / "agent.py").write_text("\n".join(lines))
    result = check(str(tmp_path / "agent.py"), task=TASK, model=pocket_folder, overrides=["model.max_model_len=256"])
    assert result.reward == 0.25
    (tmp_path / "other.py").write_text("")
    with pytest.raises(ConfigError, match="has no function 'workflow'"):
        check(str(tmp_path / "other.py"), task=TASK, model=pocket_folder)
