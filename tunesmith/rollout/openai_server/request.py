"""Parses and validates the body of a chat completion or completion request.

Input: JSON from any client, and the session's sampling defaults. Output: a `ChatRequest` or a `TextRequest`. Fields of
the request override the defaults. An option that is not supported, or not known, raises a `RequestError`; only keys
without effect on the result (`ignore`) are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tunesmith.chat.memo import build_cache_key, load_cache_key
from tunesmith.chat.messages import Message, parse_messages, parse_tools
from tunesmith.chat.renderer import Prompt, describe_scope
from tunesmith.rollout.openai_server.constraints import CONSTRAINT_FIELDS, Constraint, choose_constraint
from tunesmith.rollout.openai_server.fields import (
    FLAG,
    MAX_NUMBER,
    OBJECT,
    TEXT,
    Fields,
    Read,
    RequestError,
    ignore,
    keep,
    only,
    read_fields,
    read_number,
    read_object,
    read_texts,
    read_value,
    shorten,
)
from tunesmith.types import (
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    Sampling,
)

MAX_CHOICES = 128
MAX_BAD_WORDS = 1024
MAX_STOPS = 16
MAX_PENALTY = 2.0
"""Largest magnitude of a presence or frequency penalty, as in the OpenAI API."""
NUM_CACHED_OPTIONS, MAX_CACHED_BYTES = 1024, 16384
"""Cache size and key length for the fields of chat requests other than the messages."""

ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """What chat and text completion requests have in common."""

    sampling: Sampling
    bad_words: tuple[str, ...]
    """Texts that the reply must not contain, to be encoded."""
    constraint: Constraint | None
    """What the text of the reply must be."""
    seed: int | None
    num_choices: int
    is_stream: bool
    has_stream_usage: bool
    has_logprobs: bool
    has_token_ids: bool
    model: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(CompletionRequest):
    """One chat completion request, without its messages."""

    tools: tuple[Mapping[str, Any], ...]
    variables: tuple[tuple[str, Any], ...]
    scope: str
    """All three as in `Prompt`."""
    tool_choice: ToolChoice
    forced_tool: str | None
    """The tool that must be called, if the request names one."""
    strict_tools: frozenset[str]
    """Names of the tools whose schemas must be enforced completely, or refused."""
    is_single_call: bool
    """The response may contain at most one tool call."""
    is_continued: bool
    """The reply continues the last message."""
    keeps_stop: bool
    """The stop string that ended the reply is part of its text."""
    has_reasoning_field: bool
    """Reasoning is a field of the message; else it stays in the content."""

    @property
    def called_tool(self) -> str | None:
        """With `tool_choice` "required" the tool that must be called: the requested one or the only one; else None."""
        only_tool = self.tools[0]["function"]["name"] if len(self.tools) == 1 else None
        return self.forced_tool or only_tool

    @property
    def has_callable_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(CompletionRequest):
    """One completion request, with prompts rendered by the client."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Text or token ids; each is completed `num_choices` times."""
    adds_special_tokens: bool
    """Whether the tokenizer adds its special tokens to text prompts, such as a BOS token."""


def read_temperature(value: Any, name: str) -> float:
    number: float = read_number(float, 0)(value, name)
    if 0 < number < MIN_TEMPERATURE:
        raise ValueError(f"{name}={number} must be 0 or at least {MIN_TEMPERATURE}")
    return number


def read_logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...] | None:
    """Pairs of token id and bias; None if there is none."""
    try:
        pairs = sorted((int(token_id), float(bias)) for token_id, bias in value.items())
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{name} must map token ids to numbers", param=name) from error
    if not all(token_id >= 0 and abs(bias) <= MAX_LOGIT_BIAS for token_id, bias in pairs):
        raise ValueError(f"{name} must map token ids to numbers in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")
    return tuple(pairs) or None


def read_ids(value: Any, name: str) -> tuple[int, ...]:
    if not _is_ids(value):
        raise ValueError(f"{name} must be a list of token ids")
    return tuple(value)


def read_prompts(value: Any, name: str) -> tuple[str | tuple[int, ...], ...]:
    """Text, token ids, or a list of either."""
    prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
    for prompt in prompts:
        if not prompt or not (isinstance(prompt, str) or _is_ids(prompt)):
            raise RequestError("prompt must be text, token ids, or a list of either, none of them empty", param=name)
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < MAX_NUMBER for each in value)


def read_tools(value: Any, name: str) -> tuple[tuple[dict[str, Any], ...], frozenset[str]]:
    """The tools, and the names of those that are declared `strict`."""
    tools = parse_tools(value)
    return tools, frozenset(tool["function"]["name"] for tool in value if tool["function"].get("strict"))


def read_variables(value: Any, name: str) -> dict[str, Any]:
    variables: dict[str, Any] = OBJECT(value, name)
    if not all(isinstance(each, str) and each.isidentifier() for each in variables):
        raise ValueError(f"{name} must name template variables")
    reserved = variables.keys() & {"messages", "tools", "conversation", "tokenize", "add_generation_prompt"}
    if reserved:
        raise ValueError(f"{name} cannot set {sorted(reserved)}")
    return variables


PENALTY: Read = read_number(float, -MAX_PENALTY, MAX_PENALTY)
DISTRIBUTION_FIELDS: Fields = {
    "temperature": read_temperature,
    "top_p": read_number(float, 0, 1, is_low_open=True),
    "top_k": lambda value, name: max(0, read_number(int, -1, MAX_COUNT)(value, name)),
    "min_p": read_number(float, 0, 1),
    "logit_bias": read_logit_bias,
    "repetition_penalty": read_number(float, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "min_tokens": read_number(int, 0, MAX_COUNT),
}
"""Fields with the name and the meaning of those of `Distribution`."""
SAMPLING_FIELDS: Fields = {
    **dict.fromkeys(("ignore_eos", "return_entropy"), FLAG),
    "max_tokens": read_number(int, 1),
    "stop": read_texts(MAX_STOPS, also_one=True),
    "stop_token_ids": read_ids,
}
"""Fields with the name and the meaning of those of `Sampling`."""
IGNORED_FIELDS = (
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
)  # fmt: skip
"""Who asks, and how it is billed, stored or sped up."""
UNSUPPORTED_FIELDS = {
    "add_generation_prompt": True, "allowed_token_ids": [], "best_of": 1, "continue_final_message": False,
    "documents": [], "echo": False, "function_call": "none", "functions": [], "include_stop_str_in_output": False,
    "length_penalty": 1, "modalities": ["text"], "skip_special_tokens": True, "suffix": "", "typical_p": 1,
    "use_beam_search": False, "verbosity": "medium",
}  # fmt: skip
"""The values without effect, which alone are accepted."""
SHARED_FIELDS: Fields = {
    **DISTRIBUTION_FIELDS,
    **SAMPLING_FIELDS,
    **CONSTRAINT_FIELDS,
    **dict.fromkeys(IGNORED_FIELDS, ignore),
    "max_completion_tokens": read_number(int, 1),
    "bad_words": read_texts(MAX_BAD_WORDS),
    **dict.fromkeys(("return_token_ids", "stream"), FLAG),
    "model": TEXT,
    "n": read_number(int, 1, MAX_CHOICES),
    "seed": read_value(int),
    "stream_options": read_object(
        {"include_usage": FLAG, "include_obfuscation": only(False), "continuous_usage_stats": only(False)}
    ),
    **{name: only(value) for name, value in UNSUPPORTED_FIELDS.items()},
}
CHAT_FLAGS = (
    "add_generation_prompt", "continue_final_message", "include_stop_str_in_output", "logprobs", "parallel_tool_calls",
    "separate_reasoning",
)  # fmt: skip
CHAT_FIELDS: Fields = {
    **SHARED_FIELDS,
    **dict.fromkeys(CHAT_FLAGS, FLAG),
    "chat_template_kwargs": read_variables,
    "reasoning_effort": TEXT,
    "tool_choice": keep,
    "tools": read_tools,
    "top_logprobs": read_number(int, 0, MAX_TOP_LOGPROBS),
}
"""All but the messages."""
TEXT_FIELDS: Fields = {
    **SHARED_FIELDS,
    "add_special_tokens": FLAG,
    "logprobs": read_number(int, 0, MAX_TOP_LOGPROBS),
    "prompt": read_prompts,
    "top_logprobs": only(0),
}


def parse_text_request(body: Any, defaults: Sampling) -> TextRequest:
    given = read_fields(body, TEXT_FIELDS)
    prompts = given.get("prompt") or read_prompts(None, "prompt")
    num_choices = given.get("n", 1)
    if len(prompts) * num_choices > MAX_CHOICES:
        requested = f"{len(prompts)} prompts with n={num_choices}"
        raise RequestError(f"{requested} ask for more than {MAX_CHOICES} completions at once", param="n")
    return TextRequest(
        prompts=prompts,
        adds_special_tokens=given.get("add_special_tokens", True),
        **_build_shared(given, defaults, num_top=given.get("logprobs", 0), has_logprobs="logprobs" in given),
    )


def _build_shared(given: Mapping[str, Any], defaults: Sampling, *, num_top: int, has_logprobs: bool) -> dict[str, Any]:
    """The fields of `CompletionRequest`."""
    return {
        "sampling": _build_sampling(given, defaults, num_top=num_top),
        "bad_words": given.get("bad_words", ()),
        "constraint": choose_constraint(given),
        "seed": given.get("seed"),
        "num_choices": given.get("n", 1),
        "is_stream": given.get("stream", False),
        "has_stream_usage": given.get("stream_options", {}).get("include_usage", False),
        "has_logprobs": has_logprobs,
        "has_token_ids": given.get("return_token_ids", False),
        "model": given.get("model"),
    }


def _build_sampling(given: Mapping[str, Any], defaults: Sampling, *, num_top: int) -> Sampling:
    """The defaults, with what the request sets; `num_top`: the tokens whose logprobs it asks for."""
    old, new = given.get("max_tokens"), given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens={old} and max_completion_tokens={new} are one limit: give one of them", param="max_tokens"
        )
    distribution = {name: given[name] for name in DISTRIBUTION_FIELDS if name in given}
    fields = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    fields |= {} if new is None else {"max_tokens": new}
    return replace(
        defaults, distribution=replace(defaults.distribution, **distribution), top_logprobs=num_top, **fields
    )


class RequestParser:
    """Parses the bodies of chat requests for one chat template.

    Requests of an agent, and of all agents of a run, repeat everything but the messages, so what is parsed of the other
    fields is cached by their content.
    """

    def __init__(self, uses_variable: Callable[[str], bool]) -> None:
        """`uses_variable`: whether the chat template refers to a variable."""
        self._uses_variable = uses_variable
        self._parse_cached = functools.lru_cache(NUM_CACHED_OPTIONS)(self._parse_key)

    def parse(
        self, body: Any, defaults: Sampling, *, parse_messages: Callable[[Any], tuple[Message, ...]] = parse_messages
    ) -> tuple[ChatRequest, Prompt]:
        """The request, and its messages as a prompt; raises `RequestError`. `parse_messages` parses the messages."""
        fields = {**OBJECT(body, "the request body"), "messages": None}
        key = build_cache_key(fields)
        if key is None or len(key) > MAX_CACHED_BYTES:
            request = _parse_options(fields, defaults, self._uses_variable)
        else:
            request = self._parse_cached(key, defaults)
        try:
            messages = parse_messages(body.get("messages"))
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        reply_start = ""
        if request.is_continued:
            messages, reply_start = _split_reply_start(messages)
            if reply_start and request.tool_choice == "required":
                raise RequestError("tool_choice cannot force a call in a reply that is continued", param="tool_choice")
        # a request that is cached is not copied: that takes as long as all else here
        return request, Prompt(
            messages=messages, tools=request.tools, variables=request.variables, reply_start=reply_start,
            scope=request.scope,
        )  # fmt: skip

    def _parse_key(self, key: bytes, defaults: Sampling) -> ChatRequest:
        return _parse_options(load_cache_key(key), defaults, self._uses_variable)


def _parse_options(body: Any, defaults: Sampling, uses_variable: Callable[[str], bool]) -> ChatRequest:
    """All fields but the messages."""
    given = read_fields(body, CHAT_FIELDS)
    tools, strict_tools = given.get("tools", ((), frozenset()))
    tool_choice, forced_tool = _parse_tool_choice(given.get("tool_choice"), tools)
    has_logprobs, num_top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if num_top and not has_logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    is_continued = given.get("continue_final_message", False)
    if given.get("add_generation_prompt", not is_continued) == is_continued:
        raise RequestError(
            "add_generation_prompt must be the opposite of continue_final_message, as the reply either begins after "
            "the last message or continues it",
            param="add_generation_prompt",
        )
    shared = _build_shared(given, defaults, num_top=num_top, has_logprobs=has_logprobs)
    constraint = shared["constraint"]
    if constraint is not None and tool_choice == "required":
        raise RequestError(
            f"tool_choice forces a tool call, and {constraint.param} constrains the text of a reply without one: give "
            "only one of them", param=constraint.param,
        )  # fmt: skip
    variables = _choose_variables(given, uses_variable)
    return ChatRequest(
        tools=tools,
        variables=variables,
        scope=describe_scope([list(tools), list(variables)]),
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        strict_tools=strict_tools,
        is_single_call=bool(tools) and (forced_tool is not None or not given.get("parallel_tool_calls", True)),
        is_continued=is_continued,
        keeps_stop=given.get("include_stop_str_in_output", False),
        has_reasoning_field=given.get("separate_reasoning", True),
        **shared,
    )


def _split_reply_start(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """The messages before the last, and the last one's text, which the reply continues."""
    last = messages[-1]
    if len(messages) == 1 or last.role != "assistant" or last.tool_calls or last.reasoning:
        raise RequestError(
            "continue_final_message needs a last message of the assistant, after others, with content alone",
            param="continue_final_message",
        )
    return messages[:-1], last.content


def _choose_variables(given: Mapping[str, Any], uses_variable: Callable[[str], bool]) -> tuple[tuple[str, Any], ...]:
    """The template variables that a request sets."""
    variables = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        if not uses_variable("reasoning_effort"):
            raise RequestError("reasoning_effort is not used by this model's chat template", param="reasoning_effort")
        variables["reasoning_effort"] = given["reasoning_effort"]
    unused = {name for name in variables if not uses_variable(name)}
    named = sorted(name for name in unused if variables[name] is not None)
    if named:
        raise RequestError(
            f"chat_template_kwargs: this model's chat template does not use {', '.join(named)}; leave it out",
            param="chat_template_kwargs",
        )
    return tuple(sorted((name, value) for name, value in variables.items() if name not in unused))


def _parse_tool_choice(choice: Any, tools: tuple[Mapping[str, Any], ...]) -> tuple[ToolChoice, str | None]:
    names = [tool["function"]["name"] for tool in tools]
    if choice is None or choice in ("auto", "none"):
        return choice or "auto", None
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type", "function") != "function" or not isinstance(function, dict):
            form = '{"type": "function", "function": {"name": ...}}'
            raise RequestError(f"tool_choice={shorten(choice)}; an object names one tool: {form}", param="tool_choice")
        name = function.get("name")
        if name not in names:
            raise RequestError(f"tool_choice names {name!r}; tools has {names}", param="tool_choice")
        return "required", name
    if choice != "required":
        raise RequestError(f"tool_choice={choice!r}; allowed: auto, none, required, a named tool", param="tool_choice")
    if not tools:
        raise RequestError("tool_choice='required' needs tools", param="tool_choice")
    return "required", None
