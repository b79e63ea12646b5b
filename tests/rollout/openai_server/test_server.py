"""The endpoint from the client's side: responses, supported fields, errors."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import openai
import pytest
from served import ADD, DEFAULTS, SUB, TOKENIZERS, TOOLS, USER, build_service, create_completion, get_engine

from chat_templates import QWEN25, THINKING
from fakes import FakeEngine
from tunesmith.chat.messages import Message
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.vllm.support import check_parameters
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.rollout.service import ModelService
from tunesmith.types import Distribution

pytestmark = pytest.mark.anyio


async def test_a_call_returns_a_completion_and_is_recorded():
    service = build_service("fine")
    completion, (turn,) = await create_completion(service)
    choice = completion.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "fine", "stop")
    assert choice.message.tool_calls is None
    ((prompt_ids, sampled_ids),) = get_engine(service).ledger
    assert turn.prompt_ids == prompt_ids
    assert turn.sampled_ids == tuple(sampled_ids)
    assert turn.logprobs == tuple(map(FakeEngine.logprob_of, sampled_ids))
    assert turn.stop_reason == "eos"
    assert turn.distribution == DEFAULTS.distribution
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt_ids), len(sampled_ids))
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_parallel_tool_calls():
    completion, _ = await create_completion(build_service(f"both\n{ADD}\n{SUB}"), tools=TOOLS)
    message = completion.choices[0].message
    assert completion.choices[0].finish_reason == "tool_calls"
    assert message.content == "both"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("add", {"a": 1}), ("sub", {"b": "\u00e9"})]
    assert len({call.id for call in message.tool_calls}) == 2


async def test_calls_in_json_that_the_parser_does_not_read_are_reported(caplog):
    service = build_service(*['```json\n{"name": "add", "arguments": {"a": 1}}\n```'] * 5)
    for stream in (False, True, False, True, False):
        await create_completion(service, tools=TOOLS, stream=stream)
    assert [record.getMessage().rpartition(": set ")[2] for record in caplog.records] == [
        "model.tool_call_parser: json"
    ]


async def test_without_parallel_tool_calls_min_tokens_delays_no_stop_string_and_further_calls_are_dropped():
    service = build_service(f"{ADD}\n{SUB}")
    completion, (turn,) = await create_completion(
        service, tools=TOOLS, parallel_tool_calls=False, extra_body={"min_tokens": 5}
    )
    sampling = get_engine(service).requests[0][1]
    assert (sampling.distribution.min_tokens, sampling.stop, sampling.stop_token_ids) == (5, (), ())
    assert [each.function.name for each in completion.choices[0].message.tool_calls] == ["add"]
    assert turn.stop_reason == "eos"


async def test_min_tokens_bans_what_ends_the_reply_and_nothing_else():
    eos = TOKENIZERS[QWEN25].eos_token_id
    for fields, expected in (
        ({"min_tokens": 2}, {eos}),
        ({"min_tokens": 2, "stop_token_ids": [7]}, {7, eos}),
        ({"min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True}, {7}),
        ({"min_tokens": 2, "ignore_eos": True}, set()),
    ):
        service = build_service("fine")
        await create_completion(service, top_p=1.0, max_tokens=4, extra_body=fields)
        sampling = get_engine(service).requests[0][1]
        assert set(sampling.distribution.end_ids) == expected
        check_parameters(sampling, eos_ids=get_engine(service).eos_ids)  # vLLM delays all that ends a reply, or nothing


async def test_without_parallel_tool_calls_sampling_stops_after_one_call():
    service = build_service(f"one {ADD}{SUB}")
    completion, (turn,) = await create_completion(service, tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in completion.choices[0].message.tool_calls] == ["add"]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert turn.stop_reason == "stop"
    assert service.recorder.renderer.decode(turn.sampled_ids).endswith("</tool_call>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_starts_with_a_prefix_that_is_not_sampled(choice, stream):
    is_named = isinstance(choice, dict)
    rest = ' {"b": 2}}\n</tool_call>' if is_named else 'add", "arguments": {"a": 1}}\n</tool_call>'
    service = build_service(f"{rest}{SUB}")
    fields = {"tools": TOOLS, "tool_choice": choice, "stop": ["\n\n"], "extra_body": {"return_token_ids": True}}
    completion, (turn,) = await create_completion(service, stream=stream, **fields)
    if stream:
        calls = [call for chunk in completion for call in chunk.choices[0].delta.tool_calls or []]
    else:
        calls = completion.choices[0].message.tool_calls
        assert tuple(completion.prompt_token_ids) == turn.prompt_ids
        assert tuple(completion.choices[0].token_ids) == turn.sampled_ids
    assert [call.function.name for call in calls] == (["sub"] if is_named else ["add", "sub"])
    renderer = service.recorder.renderer
    start = '<tool_call>\n{"name": "' + ('sub", "arguments":' if is_named else "")
    assert renderer.decode(turn.prompt_ids).endswith(f"assistant\n{start}")
    assert renderer.decode(turn.sampled_ids).startswith(rest)


async def test_a_required_call_names_the_only_tool():
    service = build_service(" {}}</tool_call>")
    completion, (turn,) = await create_completion(service, tools=TOOLS[:1], tool_choice="required")
    assert completion.choices[0].message.tool_calls[0].function.name == "add"
    assert service.recorder.renderer.decode(turn.prompt_ids).endswith('{"name": "add", "arguments":')


async def test_tool_calls_are_not_parsed_without_callable_tools():
    completion, _ = await create_completion(build_service(ADD), tools=TOOLS, tool_choice="none")
    assert completion.choices[0].message.content == ADD
    assert completion.choices[0].message.tool_calls is None
    completion, _ = await create_completion(build_service(ADD))
    assert completion.choices[0].message.content == ADD


async def test_reasoning_is_separated_from_the_content():
    completion, _ = await create_completion(build_service("hm\n</think>\n\nfine", template=THINKING))
    message = completion.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "fine")


async def test_bytes_of_tokens_are_those_of_parts_of_characters():
    text = "a \U0001f600\u4f60"
    completion, _ = await create_completion(build_service(text), logprobs=True)
    tokens = completion.choices[0].logprobs.content
    assert "\ufffd" in [each.token for each in tokens]
    assert b"".join(bytes(each.bytes) for each in tokens) == f"{text}<|im_end|>".encode()


async def test_each_choice_is_a_turn():
    rng_script = lambda prompt, sampling, order: random.Random(sampling.seed).choices(range(20, 90), k=5)  # noqa: E731
    service = build_service(script=rng_script)
    completion, turns = await create_completion(service, n=3, max_tokens=5, logprobs=True)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({turn.sampled_ids for turn in turns}) == 3
    assert len({turn.prompt_ids for turn in turns}) == 1
    for choice, turn in zip(completion.choices, turns, strict=True):
        assert choice.message.content == service.recorder.renderer.decode(turn.sampled_ids)
        assert [token.logprob for token in choice.logprobs.content] == list(turn.logprobs)
        assert choice.finish_reason == "length"
    assert completion.usage.completion_tokens == 15
    assert [order for *_, order in get_engine(service).requests] == [(0, 0), (0, 1), (0, 2)]


async def test_request_fields_override_session_defaults():
    service = build_service("x")
    await create_completion(service)
    await create_completion(
        service,
        temperature=0,
        top_p=0.5,
        max_tokens=7,
        stop="END",
        logit_bias={"3": -1.5},
        extra_body={"top_k": -1, "min_p": 0, "stop_token_ids": [9]},
    )
    await create_completion(service, max_completion_tokens=8)
    (_, first, _), (_, second, _), (_, third, _) = get_engine(service).requests
    assert (first.distribution, first.max_tokens) == (DEFAULTS.distribution, 300)
    assert second.distribution == Distribution(temperature=0, top_p=0.5, logit_bias=((3, -1.5),))
    assert (second.max_tokens, second.stop, second.stop_token_ids) == (7, ("END",), (9,))
    assert third.max_tokens == 8


async def test_seeds_depend_on_session_call_and_choice():
    service = build_service("x")
    seeds = []
    for session_seed in (1, 1, 2):
        bound = service.open(seed=session_seed)
        for fields in ({}, {}, {"seed": 5}, {"seed": 5}):
            await bound.model(USER, **fields)
        bound.close()
        seeds.append([sampling.seed for _, sampling, _ in get_engine(service).requests[-4:]])
    assert seeds[0] == seeds[1]
    assert seeds[0][2] == seeds[0][3]
    assert len({*seeds[0], *seeds[2]}) == 6


async def test_stop_strings_end_the_text():
    completion, (turn,) = await create_completion(build_service("say STOP here"), stop=["STOP"])
    assert completion.choices[0].message.content == "say "
    assert completion.choices[0].finish_reason == "stop"
    assert turn.stop_reason == "stop"


async def test_a_full_context_ends_the_turn():
    completion, (turn,) = await create_completion(build_service("a long answer", max_model_len=12))
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("a ", "length")
    assert (len(turn.prompt_ids) + len(turn.sampled_ids), turn.stop_reason) == (12, "context")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_model_len", [3, 10])
async def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(max_model_len, stream):
    service = build_service("x", max_model_len=max_model_len)
    bound = service.open(seed=1)
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {max_model_len} tokens") as caught:
        await bound.model.client.chat.completions.create(model="m", messages=USER, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.body["type"] == "invalid_request_error"
    assert bound.close() == ()
    assert service.recorder.compute_stats()["rollout/num_overlong"] == 1


def test_a_prompt_that_the_kv_cache_cannot_hold_is_refused():
    """It was answered by an empty reply, which the judge scored."""
    tokenizer = build_pocket_tokenizer()
    model = build_pocket_model(tokenizer, hidden_size=96, num_layers=2)
    use_plan_attention(model)
    engine = LocalEngine(model, tokenizer, EngineSection(kv_cache_tokens=48), max_model_len=600)
    service = ModelService(engine, Renderer(tokenizer), model_name="m", sampling=DEFAULTS)
    long = [{"role": "user", "content": "1 + 2 = 3, " * 20}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 49 tokens") as caught:
        run_lockstep(create_completion(service, long))
    assert caught.value.code == "context_length_exceeded"


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    service = build_service("x", max_model_len=50)
    service.recorder.renderer.encode(" warm")
    monkeypatch.setattr(service.recorder.renderer, "_encode_prompt", None)
    with pytest.raises(openai.BadRequestError, match="cannot fit 50 tokens") as caught:
        await create_completion(service, [{"role": "user", "content": "word " * 100_000}])
    assert caught.value.code == "context_length_exceeded"


async def test_long_texts_are_tokenized_in_a_thread():
    """A coroutine counts iterations of the event loop meanwhile; without the thread it would not run."""
    service = build_service("fine", max_model_len=10**6)
    bound, num_iterations = service.open(seed=1), 0

    async def count_iterations():
        nonlocal num_iterations
        while True:
            num_iterations += 1
            await asyncio.sleep(0.001)

    counter = asyncio.ensure_future(count_iterations())
    text = "".join(random.Random(0).choices("the user asks\n", k=200_000))
    calls = [bound.model([{"role": "user", "content": content}]) for content in (text, "hi", text)]
    completions = await asyncio.gather(*calls)
    counter.cancel()
    assert [completion.id.rpartition("-")[2] for completion in completions] == ["0", "1", "2"]
    long, _, again = [turn.prompt_ids for turn in bound.close()]
    expected = service.recorder.renderer.render(Prompt(messages=(Message(role="user", content=text),)))
    assert long == again == expected
    assert num_iterations > 20


@pytest.mark.parametrize("has_content_length", [True, False])
async def test_request_bodies_over_the_limit_are_refused(has_content_length):
    service = build_service("x")
    bound = service.open(seed=1)
    body = json.dumps({"messages": USER, "user": "u" * 3000}).encode()
    headers = {"authorization": f"Bearer {bound.session.key}"}

    async def send_in_pieces():
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    answers = {}
    for limit in (2000, 4000):
        async with service.serve(max_body_bytes=limit) as url, httpx.AsyncClient() as client:
            content = body if has_content_length else send_in_pieces()
            answers[limit] = await client.post(f"{url}/chat/completions", content=content, headers=headers)
    assert (answers[2000].status_code, answers[4000].status_code) == (413, 200)
    error = answers[2000].json()["error"]
    assert "rollout.max_body_mib=0.00190735" in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 is outside"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type='xml'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "must be a JSON schema"),
        ({"frequency_penalty": 2.5}, "frequency_penalty=2.5 is outside"),
        ({"presence_penalty": -2.1}, "presence_penalty=-2.1 is outside"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty=0"),
        ({"extra_body": {"repetition_penalty": 1e-308}}, "repetition_penalty=1e-308 is outside"),
        ({"extra_body": {"repetition_penalty": 1001}}, "repetition_penalty=1001"),
        ({"extra_body": {"min_tokens": -1}}, "min_tokens=-1"),
        ({"extra_body": {"min_tokens": 2**31}, "max_tokens": 2**31}, "min_tokens=2147483648 is outside"),
        ({"extra_body": {"top_k": 2**31}}, "top_k=2147483648 is outside"),
        ({"extra_body": {"bad_words": "x"}}, "bad_words must be a list of at most 1024"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words must be"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json is not JSON"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice must be"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "x"}}}, "structured_outputs must be an object with"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}}, "both constrain the reply"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "only one of them"),
        ({"extra_body": {"made_up": 1}}, "made_up is not supported by this endpoint; leave it out"),
        ({"stream_options": {"chunk_size": 3}}, "stream_options.chunk_size is not supported"),
        ({"reasoning_effort": "low"}, "not used by this model's chat template"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 1e-39}, "temperature=1e-39 must be 0 or at least 1e-05"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"n": 0}, "n=0"),
        ({"stop": [""]}, "stop must be"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map"),
        ({"logit_bias": {"20": 1e39}}, r"logit_bias must map token ids to numbers in \[-10000, 10000\]"),
        ({"logit_bias": {"20": -1e39}}, "logit_bias must map"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice names 'mul'"),
        ({"tools": [{"type": "custom"}]}, r"tools\[0\]"),
        ({"messages": []}, "non-empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts only"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "cannot set"),
    ],
)
async def test_unsupported_requests_are_refused(fields, message):
    service = build_service("x")
    messages = fields.pop("messages", USER)
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await create_completion(service, messages, **fields)
    assert caught.value.body["type"] == "invalid_request_error"
    assert get_engine(service).ledger == []


async def test_options_without_effect_are_ignored():
    completion, _ = await create_completion(
        build_service("x"), user="u", store=False, metadata={"a": "b"}, presence_penalty=0, logprobs=False,
        response_format={"type": "text"}, extra_body={"made_up": None, "repetition_penalty": 1.0, "top_k": None},
    )  # fmt: skip
    assert completion.choices[0].message.content == "x"


async def test_another_model_is_not_found():
    service = build_service("x")
    bound = service.open(seed=1)
    with pytest.raises(openai.NotFoundError, match="serves 'm'"):
        await bound.model.client.chat.completions.create(model="gpt", messages=USER)


async def test_unknown_and_closed_keys_are_refused():
    service = build_service("x")
    bound = service.open(seed=1)
    bound.close()
    with pytest.raises(openai.AuthenticationError, match="no open trajectory"):
        await bound.model(USER)
    response = await service._http_client.post("http://x/v1/chat/completions", json={})
    assert response.status_code == 401
    assert "no API key" in response.json()["error"]["message"]
    assert get_engine(service).ledger == []


async def test_the_key_may_be_in_the_path():
    service = build_service("x")
    bound = service.open(seed=1)
    url = f"http://x/t/{bound.session.key}/v1"
    client = openai.AsyncOpenAI(base_url=url, api_key="whatever", http_client=service._http_client, max_retries=0)
    await client.chat.completions.create(model="m", messages=USER)
    assert [model.id for model in (await client.models.list()).data] == ["m"]
    assert len(bound.close()) == 1


async def test_malformed_bodies_are_refused():
    service = build_service("x")
    bound = service.open(seed=1)
    for body in (b"{", b"[]", b"\xff", b'{"messages": 3}'):
        response = await service._http_client.post(
            "http://x/v1/chat/completions", content=body, headers={"authorization": f"Bearer {bound.session.key}"}
        )
        assert response.status_code == 400, body


async def test_health_and_models():
    service = build_service("x")
    assert (await service._http_client.get("http://x/health")).json() == {"status": "ok", "policy_version": 0}
    (model,) = (await service._http_client.get("http://x/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("m", 100_000)


async def test_a_model_can_be_retrieved_by_name():
    service = ModelService(
        get_engine(build_service("x")), build_service("x").recorder.renderer, model_name="a/b c", sampling=DEFAULTS
    )
    client = service.open(seed=1).model.client
    assert (await client.models.retrieve("a/b c")).id == "a/b c"
    with pytest.raises(openai.NotFoundError, match="serves 'a/b c'"):
        await client.models.retrieve("gpt")


async def test_an_engine_error_is_a_500_and_is_recorded():
    def fail(prompt, sampling, order):
        yield 40
        raise RuntimeError("out of memory")

    service = build_service(script=fail)
    bound = service.open(seed=1)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
        await bound.model(USER)
    assert bound.session.engine_error == "RuntimeError: out of memory"
    (turn,) = bound.close()
    assert (turn.sampled_ids, turn.stop_reason) == ((40,), "cancelled")
    assert get_engine(service).ledger[0][1] == [40]


async def test_an_engine_error_during_a_stream_ends_it_with_an_error():
    def fail(prompt, sampling, order):
        yield 40
        raise RuntimeError("out of memory")

    with pytest.raises(openai.APIError, match="out of memory"):
        await create_completion(build_service(script=fail), stream=True)


async def test_fast_path_and_transport_return_equal_completions():
    """A copy of the client uses the transport; the client itself calls the endpoint directly."""
    requests = [
        {"tools": TOOLS, "logprobs": True, "n": 2, "extra_body": {"return_token_ids": True}},
        {"tools": iter(TOOLS), "temperature": openai.omit, "stream": False, "messages": (dict(USER[0]),)},
        {"top_logprobs": 3},
        {"model": "gpt"},
        {"response_format": {"type": "json_object"}},
        {"temperature": object()},
        {"no_such_argument": 1},
    ]
    for fields in requests:
        seen = []
        for is_copy in (False, True):
            service = build_service(f"both {ADD}")
            bound = service.open(seed=1)
            client = bound.model.client.copy() if is_copy else bound.model.client
            copied = {key: list(value) if key == "tools" else value for key, value in fields.items()}
            fields = fields | {key: value for key, value in copied.items() if key == "tools"}
            try:
                completion = await client.chat.completions.create(**{"model": "m", "messages": USER} | copied)
                seen.append(completion.model_dump(exclude={"id", "created"}))
            except openai.APIStatusError as error:
                seen.append((type(error), error.body, error.status_code, error.body["message"] in error.message))
            except TypeError:
                seen.append(TypeError)
            bound.close()
        assert seen[0] == seen[1]
