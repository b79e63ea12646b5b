"""Conversations that the judge accepts become rows for fine-tuning: messages, tool calls and tools as they were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import shutil
import threading

import pytest
import torch
from safetensors.numpy import load_file, save_file
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tunesmith import JudgeOutput, RunConfig, WorkflowOutput, collect_conversations
from tunesmith.commands.collect.forward import RecordedCall
from tunesmith.commands.collect.run import build_conversations
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.errors import ConfigError, RolloutError
from tunesmith.http_server import serve_app
from tunesmith.model.load import load_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},
]


def reply(content=None, call=None, **fields):
    message = {"role": "assistant", "content": content, **fields}
    if call is not None:
        function = {"name": "add", "arguments": json.dumps(call)}
        message["tool_calls"] = [{"id": "call_7", "type": "function", "function": function}]
    return message


@contextlib.contextmanager
def teacher(answer):
    """A server of chat completions in a thread; yields its URL and the requests with their keys."""
    requests = []

    async def complete(request):
        body = await request.json()
        requests.append((request.headers["authorization"], body))
        message = answer(body["messages"])
        choice = {"index": 0, "message": message, "finish_reason": "length" if message["content"] == "cut" else "stop"}
        return JSONResponse(
            {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    loop, is_over = asyncio.new_event_loop(), asyncio.Event()
    urls: queue.Queue[str] = queue.Queue()

    async def serve():
        async with serve_app(app, has_key=True) as url:
            urls.put(url)
            await is_over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield f"{urls.get()}/v1", requests
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()


async def workflow(task, model):
    """Two calls with a tool's result between them."""
    messages = [{"role": "user", "content": task["question"]}]
    first = (
        (await model.client.chat.completions.create(model=model.model_name, messages=messages, tools=TOOLS))
        .choices[0]
        .message
    )
    messages.append(first.model_dump(exclude_none=True))
    if first.tool_calls:
        messages.append({"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "5"})
        stream = await model.client.chat.completions.create(
            model=model.model_name, messages=messages, tools=TOOLS, stream=True
        )
        return WorkflowOutput(response="".join([part.choices[0].delta.content or "" async for part in stream]))
    return WorkflowOutput(response=first.content)


async def judge(task, response):
    return JudgeOutput(reward=float(response == task["answer"]))


def answer(messages):
    question = next(each["content"] for each in messages if each["role"] == "user")
    if question == "2 + 3":
        return reply("5") if messages[-1]["role"] == "tool" else reply(call={"a": 2, "b": 3}, reasoning_content="add")
    return reply({"cut": "cut", "wrong": "6"}[question])


@pytest.fixture
def config(tmp_path, pocket_folder):
    tasks = [("2 + 3", "5"), ("wrong", "7"), ("cut", "cut")]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in tasks))
    return RunConfig(
        model={"path": str(pocket_folder), "max_model_len": 64, "max_tokens": 3, "device": "cpu"},
        engine={"kv_cache_tokens": 4096},
        train_dataset={"path": str(path)},
        algorithm={"batch_size": 2},
        rollout={"chat_model": "openai"},
    )


def collect(config, out, url=None, **options):
    overrides = [] if url is None else [f'teacher={{"base_url": "{url}", "path": "big"}}']
    overrides += [f"{key}={value}" for key, value in options.items()]
    return collect_conversations(config, out=out, workflow_func=workflow, judge_func=judge, overrides=overrides)


def test_a_teachers_accepted_rollouts_become_rows_that_fine_tuning_renders(config, tmp_path, pocket_folder):
    out = tmp_path / "rows.jsonl"
    with teacher(answer) as (url, requests):
        result = collect(config, out, url, num_runs=2)
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["messages"] == [
        {"role": "user", "content": "2 + 3"},
        reply(call={"a": 2, "b": 3}, reasoning_content="add"),
        {"role": "tool", "tool_call_id": "call_7", "content": "5"},
        reply("5"),
    ]
    assert (row["tools"], row["reward"]) == (TOOLS, 1.0)
    assert result.dropped == {"below min_reward": 2, "cut off at a limit of tokens": 2, "repeated": 1}
    assert {body["model"] for _, body in requests} == {"big"}
    samples = ConversationReader(load_tokenizer(str(pocket_folder))).read([row], max_model_len=512)
    assert sum(map(sum, (sample.is_sampled for sample in samples))) > 0


def test_the_runs_own_model_is_sampled_and_its_accepted_rollouts_are_kept(config, tmp_path):
    async def plain(task, model):
        completion = await model([{"role": "user", "content": task["question"]}])
        return WorkflowOutput(response=completion.choices[0].message.content)

    async def accept(task, response):
        return JudgeOutput(reward=1.0 - 1e-16)  # below min_reward by rounding

    result = collect_conversations(
        config, out=tmp_path / "rows.jsonl", workflow_func=plain, judge_func=accept, overrides=["num_runs=3"]
    )
    rows = [json.loads(line) for line in result.path.read_text().splitlines()]
    assert "below min_reward" not in result.dropped
    assert result.num_rollouts == 9 == len(rows) + sum(result.dropped.values())
    assert all([each["role"] for each in row["messages"]] == ["user", "assistant"] for row in rows)


def test_the_number_of_cpu_threads_is_that_of_the_config(config, tmp_path):
    before, found = torch.get_num_threads(), set()

    async def plain(task, model):
        found.add(torch.get_num_threads())
        completion = await model([{"role": "user", "content": task["question"]}])
        return WorkflowOutput(response=completion.choices[0].message.content, reward=1.0)

    torch.set_num_threads(2)
    try:
        with teacher(answer) as (url, _):
            overrides = [f'teacher={{"base_url": "{url}", "path": "big"}}', "num_cpu_threads=1"]
            collect_conversations(config, out=tmp_path / "teacher.jsonl", workflow_func=plain, overrides=overrides)
            torch.set_num_threads(2)
            collect_conversations(config, out=tmp_path / "own.jsonl", workflow_func=plain)
    finally:
        torch.set_num_threads(before)
    assert found == {1}


def test_a_killed_collection_resumes_after_the_last_whole_batch(config, tmp_path):
    out = tmp_path / "rows.jsonl"

    def break_down(messages):
        return answer(messages) if messages[0]["content"] != "cut" else {"content": 1 / 0}

    with teacher(break_down) as (url, _), pytest.raises(RolloutError):
        collect(config, out, url, num_runs=1)
    assert not out.exists()
    with teacher(answer) as (moved, requests):
        with pytest.raises(ConfigError, match="num_runs"):
            collect(config, out, moved, num_runs=2)
        result = collect(config, out, moved, num_runs=1)
    assert {body["messages"][0]["content"] for _, body in requests} == {"cut"}
    assert (result.num_rows, result.num_tasks, result.num_rollouts) == (1, 3, 3)
    assert [path.name for path in tmp_path.glob("rows*")] == ["rows.jsonl"]


def test_a_killed_collection_is_not_continued_with_a_model_that_was_trained_again(config, tmp_path, pocket_folder):
    folder = shutil.copytree(pocket_folder, tmp_path / "model")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    is_killed = [True]

    async def plain(task, model):
        completion = await model([{"role": "user", "content": task["question"]}])
        if is_killed[0] and task["question"] == "cut":
            raise KeyboardInterrupt
        return WorkflowOutput(response=completion.choices[0].message.content, reward=1.0)

    def start():
        return collect_conversations(config, out=tmp_path / "rows.jsonl", workflow_func=plain)

    with pytest.raises(KeyboardInterrupt):
        start()
    is_killed[0], file = False, folder / "model.safetensors"
    before = file.read_bytes()
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="part was made with other settings: the content of weights.rows changed"):
        start()
    file.write_bytes(before)
    assert start().num_tasks == 3


def test_a_wrong_address_of_a_teacher_is_one_sentence():
    from tunesmith.commands.settings import read_teacher

    assert read_teacher("https://x.org/v1/org/name") == {"base_url": "https://x.org/v1", "path": "org/name"}
    with pytest.raises(ConfigError, match="--teacher 'gpt' is not of the form"):
        read_teacher("gpt")


def call(messages, text, tools=()):
    return RecordedCall(messages=messages, tools=list(tools), reply=reply(text), is_cut=False)


def test_replies_of_a_conversation_are_trained_once_and_messages_of_others_are_context():
    user, other = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    few_shot = [other, reply("shot"), user]
    first = call(few_shot, "one")
    left = call([*few_shot, reply("one"), other], "left")
    right = call([*few_shot, reply(" one "), user], "right")
    rows = [messages for messages, _ in build_conversations([first, left, right])]
    assert rows == [
        [other, reply("shot", weight=0), user, reply("one"), other, reply("left")],
        [other, reply("shot", weight=0), user, reply("one", weight=0), user, reply("right")],
    ]
    [(same, _), (separate, tools)] = build_conversations([first, call([*few_shot, reply("one")], "two", TOOLS)])
    assert (same[-1], separate[-1], tools) == (reply("one"), reply("two"), TOOLS)
