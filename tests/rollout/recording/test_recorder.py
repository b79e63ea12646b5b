"""Sessions: every sampled token is in exactly one turn, and later calls extend recorded turns."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from chat_templates import CHATML, LLAMA3, QWEN3, QWEN25
from fakes import FakeEngine, Script, build_chat_tokenizer, say
from tunesmith.chat.conversation import compute_match_keys
from tunesmith.chat.messages import parse_messages
from tunesmith.chat.renderer import Renderer
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.experience.samples import build_samples
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.rollout.service import BoundModel, ModelService
from tunesmith.types import Group, Sampling, Task, Trajectory, Turn

pytestmark = pytest.mark.anyio

TOKENIZERS = {template: build_chat_tokenizer(template) for template in (CHATML, LLAMA3, QWEN25, QWEN3)}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.0}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


def build_service(*replies: str, script: Script | None = None, template: str = QWEN25) -> ModelService:
    tokenizer = TOKENIZERS[template]
    engine = FakeEngine(tokenizer, script or say(tokenizer, *replies))
    return ModelService(engine, Renderer(tokenizer), model_name="m", sampling=Sampling(max_tokens=300))


def extends(later: Turn, turn: Turn) -> bool:
    tokens = turn.prompt_ids + turn.sampled_ids
    return later.prompt_ids[: len(tokens)] == tokens


# Match keys


CALLS = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2.0, "y"]}'}}]
RESULT = {"role": "tool", "tool_call_id": "x", "content": "3"}


@pytest.mark.parametrize(
    "history",
    [
        [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}, RESULT],
        [
            {"role": "user", "content": [{"type": "text", "text": "hi "}]},
            {"role": "assistant", "tool_calls": CALLS},
            RESULT,
        ],
        [
            USER,
            {"role": "assistant", "content": [], "reasoning_content": "hm", "name": "friday", "tool_calls": CALLS},
            {**RESULT, "name": "add"},
        ],
        [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "other", "function": {"name": "add", "arguments": '{"b":[2,"\\u0079"],"a":1}'}},
                ],
            },
            {**RESULT, "tool_call_id": "other"},
        ],
        [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "3\n"}],
    ],
    ids=["null or empty", "parts", "reasoning and names", "other ids and JSON", "no id"],
)
def test_reformatted_histories_have_equal_match_keys(history):
    reference = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, RESULT]
    assert compute_match_keys(parse_messages(history)) == compute_match_keys(parse_messages(reference))


@pytest.mark.parametrize(
    "history",
    [
        [USER, {"role": "assistant", "content": "x", "tool_calls": CALLS}, RESULT],
        [USER, {"role": "assistant", "tool_calls": CALLS * 2}, RESULT],
        [{"role": "system", "content": "hi"}, {"role": "assistant", "tool_calls": CALLS}, RESULT],
        [{**USER, "name": "bob"}, {"role": "assistant", "tool_calls": CALLS}, RESULT],
        [USER, {"role": "assistant", "tool_calls": CALLS}, {**RESULT, "content": "4"}],
        [
            USER,
            {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": "{}"}}]},
            RESULT,
        ],
    ],
)
def test_different_histories_have_different_match_keys(history):
    reference = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, RESULT]
    assert compute_match_keys(parse_messages(history)) != compute_match_keys(parse_messages(reference))


def test_tool_results_are_matched_to_calls_by_id():
    calls = [{"id": i, "function": {"name": "add", "arguments": "{}"}} for i in "xy"]
    in_order = [USER, {"role": "assistant", "tool_calls": calls}]
    in_order += [{"role": "tool", "tool_call_id": i, "content": "r"} for i in "xy"]
    swapped = [*in_order[:2], in_order[3], in_order[2]]
    assert compute_match_keys(parse_messages(in_order)) != compute_match_keys(parse_messages(swapped))


# Extending, branching, counting


async def create_message(bound: BoundModel, messages, **options):
    return (await bound.model(messages, **options)).choices[0].message


async def test_call_counters():
    service = build_service("a")
    bound = service.open(seed=1)
    first = await create_message(bound, [USER])
    history = [USER, first]
    await create_message(bound, [*history, USER])
    await create_message(bound, [*history, USER])
    await create_message(bound, [{"role": "system", "content": "new"}, *history, USER])
    turns = bound.close()
    assert [extends(turn, turns[0]) for turn in turns[1:]] == [True, True, False]
    assert service.recorder.compute_stats() == {
        "rollout/num_calls": 4, "rollout/num_extended": 2, "rollout/num_unextended": 0, "rollout/num_repeats": 1,
        "rollout/num_overlong": 0,
    }  # fmt: skip
    assert service.recorder.compute_stats() == {}


async def test_a_call_extends_the_longest_recorded_prefix():
    service = build_service("a", "b", "c")
    bound = service.open(seed=1)
    history = [USER]
    for _ in range(3):
        history += [await create_message(bound, history), USER]
    turns = bound.close()
    assert extends(turns[1], turns[0])
    assert extends(turns[2], turns[1])


async def test_calls_with_other_tools_start_a_branch():
    service = build_service("a")
    bound = service.open(seed=1)
    history = [USER, await create_message(bound, [USER], tools=TOOLS), USER]
    await create_message(bound, history, tools=TOOLS[:1])
    await create_message(bound, history, tools=TOOLS)
    turns = bound.close()
    assert [extends(turn, turns[0]) for turn in turns[1:]] == [False, True]


async def test_of_equal_replies_the_last_one_is_extended():
    tokenizer = TOKENIZERS[QWEN25]
    spellings = iter([tokenizer.encode("the"), tokenizer.encode("t") + tokenizer.encode("he"), tokenizer.encode("x")])
    service = build_service(script=lambda *_: [*next(spellings), tokenizer.eos_token_id])
    bound = service.open(seed=1)
    await create_message(bound, [USER])
    reply = await create_message(bound, [USER])
    await create_message(bound, [USER, reply, USER])
    turns = bound.close()
    assert turns[0].sampled_ids != turns[1].sampled_ids
    assert extends(turns[2], turns[1])
    assert not extends(turns[2], turns[0])


@pytest.mark.parametrize("call", ["", ADD])
async def test_of_replies_with_equal_text_the_one_whose_reasoning_or_call_ids_are_sent_back_is_extended(call):
    service = build_service(f"<think>a</think>x{call}", f"<think>b</think>x{call}", "y", template=QWEN3)
    bound = service.open(seed=1)
    replies = [await create_message(bound, [USER], tools=TOOLS) for _ in range(2)]
    for reply in replies:
        sent = reply.model_dump(exclude_none=True)
        if call:  # the ids tell which reply it is
            del sent["reasoning_content"]
        results = [{"role": "tool", "tool_call_id": each.id, "content": "3"} for each in reply.tool_calls or ()]
        await create_message(bound, [USER, sent, *(results or [USER])], tools=TOOLS)
    turns = bound.close()
    assert extends(turns[2], turns[0]) and extends(turns[3], turns[1])


async def test_truncated_replies_can_be_extended():
    service = build_service("one two three")
    bound = service.open(seed=1)
    short = await create_message(bound, [USER], max_tokens=4)
    stopped = await create_message(bound, [USER, short, USER], stop=["two"])
    assert stopped.content == "one "
    await create_message(bound, [USER, short, USER, stopped, USER])
    turns = bound.close()
    assert [turn.stop_reason for turn in turns] == ["length", "stop", "eos"]
    assert extends(turns[1], turns[0])
    assert extends(turns[2], turns[1])
    text = service.recorder.renderer._tokenizer.decode(turns[2].prompt_ids)
    assert "one two<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in text


async def test_sessions_are_independent():
    service = build_service("a")
    first, second = service.open(seed=1), service.open(seed=2)
    reply = await create_message(first, [USER])
    await create_message(second, [USER, reply, USER])
    assert second.session.num_extended == 0
    assert len(first.close()) == len(second.close()) == 1


async def test_turns_are_in_order_of_arrival():
    def script(prompt, sampling, order):
        return [30] * (9 if order[-2] == 0 else 2)

    service = build_service(script=script)
    bound = service.open(seed=1, order=(5,))
    await asyncio.gather(create_message(bound, [USER], max_tokens=9), create_message(bound, [USER, USER], max_tokens=2))
    turns = bound.close()
    assert [len(turn.sampled_ids) for turn in turns] == [9, 2]
    assert [order for *_, order in service.recorder.engine.requests] == [(5, 0, 0), (5, 1, 0)]


def test_the_calls_of_a_session_are_one_conversation_to_the_scheduler():
    tokenizer = build_pocket_tokenizer()
    model = build_pocket_model(tokenizer, hidden_size=96, num_layers=2)
    use_plan_attention(model)
    engine = LocalEngine(model, tokenizer, EngineSection(kv_cache_tokens=2000), max_model_len=400)
    service = ModelService(engine, Renderer(tokenizer), model_name="m", sampling=Sampling(max_tokens=4))

    async def run() -> None:
        first, second = (service.open(seed=1, order=(0, run_index)) for run_index in range(2))
        reply = await create_message(first, [USER])
        await create_message(second, [USER])
        await create_message(first, [USER, reply, USER])

    run_lockstep(run())
    scheduler = engine._output_processor.scheduler
    assert scheduler._turn_distance == 1  # the second session's request ended between the turns of the first one
    assert set(scheduler._ended_at) == {(0, 0), (0, 1)}


async def test_policy_versions_are_recorded():
    service = build_service(script=lambda *_: [30, 31, 32])
    service.recorder.engine.policy_version = 4
    bound = service.open(seed=1)
    await create_message(bound, [USER], max_tokens=3)
    (turn,) = bound.close()
    assert turn.policy_versions == (4, 4, 4)


# Fuzzing with random agents


def reshape(message: dict, rng: random.Random) -> dict:
    """An assistant message in a form in which a client may send it back."""
    message = {key: value for key, value in message.items() if value is not None}
    if rng.random() < 0.5 and "reasoning_content" in message:
        del message["reasoning_content"]
    content = message.get("content") or ""
    shapes = [content, [{"type": "text", "text": content}], content + "\n"] + ([None] if not content else [])
    message["content"] = rng.choice(shapes)
    if message.get("tool_calls"):
        new_ids = rng.random() < 0.3
        message["tool_calls"] = [
            {
                "id": f"new{len(content)}{i}" if new_ids else call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(json.loads(call["function"]["arguments"]), sort_keys=rng.random() < 0.5),
                },
            }
            for i, call in enumerate(message["tool_calls"])
        ]
    return message


async def call_model(bound: BoundModel, history: list[dict], rng: random.Random) -> dict | None:
    """Send one request in a random way; returns None if there is no reply to continue from."""
    fields = {"model": "m", "messages": history, "tools": TOOLS, "max_tokens": rng.choice([3, 60, 300])}
    create = bound.model.client.chat.completions.create
    way = rng.random()
    if way < 0.2:
        stream = await create(**fields, stream=True)
        num_chunks = rng.randrange(9)
        async for _ in stream:
            num_chunks -= 1
            if num_chunks < 0:
                break
        await stream.close()
        return None
    if way < 0.35:
        request = asyncio.ensure_future(create(**fields))
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait({request})
        return None
    if way < 0.45:
        completion, _ = await asyncio.gather(create(**fields), create(**fields))
    else:
        completion = await create(**fields, n=rng.choice([1, 1, 1, 2]))
    return rng.choice(completion.choices).message.model_dump(exclude_unset=True)


async def run_agent(bound: BoundModel, rng: random.Random) -> None:
    """Calls tools, retries, sends parallel requests, closes streams early, edits and drops messages."""
    history = [{"role": "system", "content": "S"}, dict(USER)]
    for _ in range(rng.randrange(1, 7)):
        message = await call_model(bound, list(history), rng)
        if message is None or rng.random() < 0.1:
            continue
        message = reshape(message, rng)
        history.append(message)
        calls = message.get("tool_calls") or ()
        history += [{"role": "tool", "tool_call_id": c["id"], "content": str(rng.randrange(99))} for c in calls]
        if not calls or rng.random() < 0.2:
            history.append(dict(USER))
        if rng.random() < 0.15:
            del history[rng.randrange(len(history))]
        if rng.random() < 0.2:
            history[rng.randrange(len(history))]["content"] = "edited"


PIECES = [
    ADD,
    ADD.replace("add", "sub"),
    "<think>\nhm\n</think>\n\n",
    "<tool_call>{",
    "text",
    " ",
    "\n",
    "\u00e9",
    "\U0001f600",
]


def build_random_script(template: str) -> Script:
    """Samples pieces of replies in random tokenizations, so that encoding the text again gives other ids."""
    tokenizer = TOKENIZERS[template]

    def script(prompt, sampling, order):
        rng = random.Random(sampling.seed)
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 5)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        ids = [i for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for i in tokenizer.encode(text[a:b])]
        return [*ids, tokenizer.eos_token_id]

    return script


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN25, QWEN3], ids=["chatml", "llama3", "qwen25", "qwen3"])
@pytest.mark.parametrize("seed", range(12))
async def test_every_sampled_token_is_recorded_once_and_trained_once(template, seed):
    service = build_service(script=build_random_script(template), template=template)
    bound = service.open(seed=seed)
    await run_agent(bound, random.Random(seed))
    turns = bound.close()

    sampled = Counter((prompt, tuple(ids)) for prompt, ids in service.recorder.engine.ledger if ids)
    assert Counter((turn.prompt_ids, turn.sampled_ids) for turn in turns) == sampled
    for turn in turns:
        assert turn.logprobs == tuple(map(FakeEngine.logprob_of, turn.sampled_ids))

    task = Task(task_id="t/0", index=0, row={})
    trajectories = tuple(Trajectory(task=task, run_index=i, turns=turns, reward=1.0) for i in range(2))
    group = Group(task=task, trajectories=trajectories)
    samples, _ = build_samples([group], [[1.0, None]])
    trained = Counter(
        sample.token_ids[: position + 1]
        for sample in samples
        for position, is_sampled in enumerate(sample.is_sampled)
        if is_sampled
    )
    expected = Counter(
        turn.prompt_ids + turn.sampled_ids[: count + 1] for turn in turns for count in range(len(turn.sampled_ids))
    )
    assert trained == expected
