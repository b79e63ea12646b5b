"""/v1/completions: client-rendered prompts as text or token ids."""

from __future__ import annotations

import random

import openai
import pytest
from served import DEFAULTS, build_service, get_engine

from fakes import FakeEngine
from tunesmith.rollout.service import ModelService
from tunesmith.types import Turn

pytestmark = pytest.mark.anyio


async def complete(service: ModelService, **fields) -> tuple[openai.types.Completion, tuple[Turn, ...]]:
    """Send one request in a new session; returns the completion (or its chunks) and the recorded turns."""
    bound = service.open(seed=1)
    try:
        completion = await bound.model.client.completions.create(model="m", **fields)
        if fields.get("stream"):
            completion = [chunk async for chunk in completion]
    finally:
        turns = bound.close()
    return completion, turns


async def test_a_text_is_completed_and_recorded():
    service = build_service("fine <tool_call> </think>")
    completion, (turn,) = await complete(service, prompt="<|im_start|>user\nhi<|im_end|>\n")
    (choice,) = completion.choices
    assert (completion.object, choice.text, choice.finish_reason) == (
        "text_completion",
        "fine <tool_call> </think>",
        "stop",
    )
    ((prompt_ids, sampled_ids),) = get_engine(service).ledger
    expected = service.recorder.renderer._tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert turn.prompt_ids == prompt_ids == tuple(expected)
    assert turn.sampled_ids == tuple(sampled_ids)
    assert turn.logprobs == tuple(map(FakeEngine.logprob_of, sampled_ids))
    assert turn.distribution == DEFAULTS.distribution
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(prompt_ids), len(sampled_ids))


async def test_text_offsets_of_a_stream_are_those_of_the_whole_text():
    fields = {"prompt": [[40], [41]], "n": 2, "logprobs": 0}
    whole, _ = await complete(build_service("one two \u00e9"), **fields)
    chunks, _ = await complete(build_service("one two \u00e9"), stream=True, **fields)
    streamed = [each for chunk in chunks for each in chunk.choices if each.logprobs]
    for choice in whole.choices:
        parts = [each.logprobs for each in streamed if each.index == choice.index]
        assert [offset for part in parts for offset in part.text_offset] == choice.logprobs.text_offset
        assert len(choice.logprobs.text_offset) == len(choice.logprobs.tokens) > 5


async def test_token_id_prompts_are_used_unchanged():
    service = build_service("fine")
    completion, (turn,) = await complete(
        service, prompt=[40, 41, 42], logprobs=0, extra_body={"return_token_ids": True}
    )
    (choice,) = completion.choices
    assert turn.prompt_ids == (40, 41, 42) == tuple(choice.prompt_token_ids)
    assert tuple(choice.token_ids) == turn.sampled_ids
    assert choice.logprobs.token_logprobs == list(turn.logprobs)
    assert choice.logprobs.tokens[-1] == "<|im_end|>"
    offsets = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    assert all("".join(choice.logprobs.tokens)[start:].startswith(token) for start, token in offsets)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_is_completed_n_times(stream):
    script = lambda prompt, sampling, order: random.Random(sampling.seed).choices(range(20, 90), k=5)  # noqa: E731
    service = build_service(script=script)
    answer, turns = await complete(
        service, prompt=[[40], [41, 42]], n=2, max_tokens=5, stream=stream, stream_options={"include_usage": True}
    )
    assert [turn.prompt_ids for turn in turns] == [(40,), (40,), (41, 42), (41, 42)]
    assert len({turn.sampled_ids for turn in turns}) == 4
    texts, reasons = [""] * 4, [None] * 4
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [service.recorder.renderer.decode(turn.sampled_ids) for turn in turns]
    assert reasons == ["length"] * 4
    usage = (answer[-1] if stream else answer).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 20)
    assert [order for *_, order in get_engine(service).requests] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text(stream):
    answer, (turn,) = await complete(build_service("say STOP here"), prompt="a", stop=["STOP"], stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "say "
    assert choices[-1].finish_reason == "stop"
    assert turn.stop_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "echo": True}, "echo=True is not supported"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of=2"),
        ({"prompt": "a", "logprobs": 21}, "logprobs=21 is outside"),
        ({"prompt": ""}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [[1], []]}, "prompt must be"),
        ({"prompt": ["a", 1]}, "prompt must be"),
        ({"prompt": [-1]}, "prompt must be"),
        ({"prompt": ["a"] * 65, "n": 2}, "more than 128 completions"),
    ],
)
async def test_unsupported_requests_are_refused(fields, message):
    service = build_service("x")
    with pytest.raises(openai.BadRequestError, match=message):
        await complete(service, **fields)
    assert get_engine(service).ledger == []


@pytest.mark.parametrize("prompt", ["q q q q q", [40] * 7, ["a", [40] * 7]])
async def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(prompt):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 7 tokens") as caught:
        await complete(build_service("x", max_model_len=7), prompt=prompt)
    assert caught.value.code == "context_length_exceeded"


async def test_a_closed_session_and_another_model_are_refused():
    service = build_service("x")
    bound = service.open(seed=1)
    with pytest.raises(openai.NotFoundError, match="serves 'm'"):
        await bound.model.client.completions.create(model="gpt", prompt="a")
    bound.close()
    with pytest.raises(openai.AuthenticationError):
        await bound.model.client.completions.create(model="m", prompt="a")
