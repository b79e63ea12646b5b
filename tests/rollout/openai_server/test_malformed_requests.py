"""Request bodies that are not JSON or not requests: a 4xx status with a reason, and the engine is not called."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from served import TOOLS, USER, build_service

from tunesmith.rollout.openai_server.app import parse_json
from tunesmith.rollout.openai_server.fields import ApiError

pytestmark = pytest.mark.anyio

JUNK = [
    None,
    True,
    0,
    -1,
    1.5,
    10**400,
    float("inf"),
    "",
    "x",
    "\ud800",
    [],
    [1],
    {},
    {"type": "text"},
    [{}],
    [None],
    ["a"],
]
FIELDS = [
    "messages", "model", "tools", "tool_choice", "stop", "n", "seed", "temperature", "top_p", "top_k", "min_p",
    "max_tokens", "logit_bias", "logprobs", "parallel_tool_calls", "stop_token_ids", "chat_template_kwargs",
    "reasoning_effort", "response_format", "stream", "stream_options", "return_token_ids", "top_logprobs",
]  # fmt: skip
PARTS = ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "function_call"]


def build_junk_body(rng: random.Random) -> dict:
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}], "tools": TOOLS}
    if rng.random() < 0.5:
        body |= {rng.choice(FIELDS): rng.choice(JUNK)}
    elif rng.random() < 0.7:
        rng.choice(body["messages"])[rng.choice(PARTS)] = rng.choice(JUNK)
    else:
        call = {"id": "x", "function": {"name": "add", "arguments": "{}"}}
        holder = rng.choice([call, call["function"]])
        holder[rng.choice(["id", "function", "name", "arguments"])] = rng.choice(JUNK)
        body["messages"][1]["tool_calls"] = [call]
    return body


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [1, 1.5, -0, 1e999, 12345678901234567890123, null, true, "\\u20ac"]}',
        b'{"a": NaN, "b": -Infinity, "a": 2}',
        b'{"lone": "\\ud800"}',
        '{"a": "\u20ac"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"[" * 500 + b"]" * 500,
        b' "text" ',
    ],
)
def test_json_bodies_have_the_values_of_the_standard_library(body):
    expected, parsed = json.loads(body), parse_json(body)
    assert repr(parsed) == repr(expected)


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": 1} x', b"\xff", b"{'a': 1}", b"[" * 10**6, b'"\n"'])
def test_what_is_not_json_is_refused_in_the_same_words(body):
    with pytest.raises(ApiError, match="^the request body is not JSON: ") as error:
        parse_json(body)
    assert error.value.status == 400


async def test_malformed_requests_get_a_4xx_status():
    service = build_service("x")
    rng = random.Random(0)
    statuses = Counter()
    for _ in range(600):
        bound = service.open(seed=1)
        response = await service._http_client.post(
            "http://x/v1/chat/completions",
            content=json.dumps(build_junk_body(rng)).encode(),
            headers={"authorization": f"Bearer {bound.session.key}"},
        )
        statuses[response.status_code] += 1
        assert bound.session.engine_error is None
        bound.close()
    assert set(statuses) <= {200, 400, 404}
    assert min(statuses[200], statuses[400]) > 100


@pytest.mark.parametrize(
    ("route", "body", "status", "answer"),
    [
        ("chat/completions", {"messages": USER, "\ud800": 1}, 400, "\ufffd is not supported by this endpoint"),
        ("responses", {"input": "hi", "user": "\ud800"}, 200, '"user": "\ufffd"'),
        ("responses", {"input": "hi", "user": "\ud800", "stream": True}, 200, '"user": "\ufffd"'),
        (
            "messages",
            {"max_tokens": 5, "messages": USER, "tool_choice": {"type": ["auto"]}},
            400,
            "tool_choice.type is",
        ),
    ],
)
async def test_text_that_is_not_unicode_and_types_that_are_not_text_are_answered(route, body, status, answer):
    service = build_service("x")
    bound = service.open(seed=1)
    headers = {"authorization": f"Bearer {bound.session.key}"}
    response = await service._http_client.post(f"http://x/v1/{route}", content=json.dumps(body), headers=headers)
    assert response.status_code == status
    assert answer in response.text
    assert len(bound.close()) == (status == 200)


DEEP = "[" * 3000
HUGE = 10**400


@pytest.mark.parametrize(
    ("route", "fields", "sentence"),
    [
        ("completions", {}, "prompt must be text, token ids, or a list of either"),
        ("completions", {"prompt": None}, "prompt must be text, token ids, or a list of either"),
        ("completions", {"prompt": "x", "logit_bias": {"5": HUGE}}, "logit_bias must map token ids to numbers"),
        ("completions", {"prompt": "x", "guided_json": DEEP}, "guided_json is not JSON"),
        ("completions", {"prompt": "x", "bad_words": ["\ud800"]}, "the text contains lone surrogates"),
        ("chat/completions", {"messages": USER, "guided_json": DEEP}, "guided_json is not JSON"),
        ("chat/completions", {"messages": USER, "bad_words": ["\ud800"]}, "the text contains lone surrogates"),
        (
            "chat/completions",
            {"messages": USER, "tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": "auto"}}]},
            "tools[0].function.parameters must be a JSON schema, an object",
        ),
        (
            "messages",
            {"messages": USER, "max_tokens": 5, "tools": [{"name": "f", "input_schema": [1]}]},
            "tools[0].function.parameters must be a JSON schema, an object",
        ),
        (
            "responses",
            {"input": "x", "tool_choice": "required", "tools": [{"type": "function", "name": ""}]},
            "tools[0] must be {type: function, function: {name, ...}}",
        ),
    ],
)
async def test_values_that_only_their_use_would_reject_are_refused(route, fields, sentence):
    service = build_service("x")
    bound = service.open(seed=1)
    headers = {"authorization": f"Bearer {bound.session.key}"}
    response = await service._http_client.post(f"http://x/v1/{route}", content=json.dumps(fields), headers=headers)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]
    assert bound.close() == ()
