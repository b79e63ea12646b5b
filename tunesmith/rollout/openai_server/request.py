"""Parses and validates the body of a chat completion or completion request.

Input: JSON from any client, and the session's sampling defaults. Output: a `ChatRequest` or a `TextRequest`. Fields of
the request override the defaults. An option that is not supported, or not known, raises a `RequestError`; only keys
without effect on the result (`INERT_FIELDS`) are ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tunesmith.chat.memo import build_cache_key, load_cache_key
from tunesmith.chat.messages import Message, parse_messages, parse_tools
from tunesmith.chat.renderer import Prompt
from tunesmith.rollout.openai_server.constraints import Constraint, parse_constraint
from tunesmith.rollout.openai_server.fields import (
    CHAT_FIELDS,
    CONTINUATION_FIELDS,
    EXTENDED_FIELDS,
    INERT_FIELDS,
    MAX_NUMBER,
    NEUTRAL_VALUES,
    SHARED_FIELDS,
    TEXT_FIELDS,
    RequestError,
    get_field,
    get_number,
    parse_sampling,
    shorten,
)
from tunesmith.types import Sampling

STREAM_OPTIONS = ("include_usage",)
MAX_CHOICES = 128
MAX_BAD_WORDS = 1024
MAX_TOP_LOGPROBS = 20
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
    """One chat completion request."""

    prompt: Prompt
    tool_choice: ToolChoice
    forced_tool: str | None
    """The tool that must be called, if the request names one."""
    strict_tools: frozenset[str]
    """Names of the tools whose schemas must be enforced completely, or refused."""
    is_single_call: bool
    """The response may contain at most one tool call."""
    keeps_stop: bool
    """The stop string that ended the reply is part of its text."""
    has_reasoning_field: bool
    """Reasoning is a field of the message; else it stays in the content."""

    @property
    def called_tool(self) -> str | None:
        """With `tool_choice` "required" the tool that must be called: the requested one or the only one; else None."""
        tools = self.prompt.tools
        only = tools[0]["function"]["name"] if len(tools) == 1 else None
        return self.forced_tool or only

    @property
    def has_callable_tools(self) -> bool:
        return bool(self.prompt.tools) and self.tool_choice != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(CompletionRequest):
    """One completion request, with prompts rendered by the client."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Text or token ids; each is completed `num_choices` times."""
    adds_special_tokens: bool
    """Whether the tokenizer adds its special tokens to text prompts, such as a BOS token."""


def parse_text_request(body: Any, defaults: Sampling) -> TextRequest:
    """Parse the body of a completion request."""
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    _refuse_unsupported(body, TEXT_FIELDS)
    prompts = _parse_prompts(body.get("prompt"))
    num_top = get_number(body, "logprobs", int, 0, low=0, high=MAX_TOP_LOGPROBS)
    shared = _parse_shared(body, defaults, num_top=num_top, has_logprobs=body.get("logprobs") is not None)
    num_choices = shared["num_choices"]
    if len(prompts) * num_choices > MAX_CHOICES:
        requested = f"{len(prompts)} prompts with n={num_choices}"
        raise RequestError(f"{requested} ask for more than {MAX_CHOICES} completions at once", param="n")
    if body.get("top_logprobs"):
        raise RequestError("top_logprobs is for chat completions: give logprobs as a number", param="top_logprobs")
    return TextRequest(prompts=prompts, adds_special_tokens=get_field(body, "add_special_tokens", bool, True), **shared)


def _parse_shared(body: Mapping[str, Any], defaults: Sampling, *, num_top: int, has_logprobs: bool) -> dict[str, Any]:
    """The fields of `CompletionRequest`."""
    return {
        "sampling": parse_sampling(body, defaults, num_top=num_top),
        "bad_words": _parse_bad_words(body),
        "constraint": parse_constraint(body),
        "seed": get_field(body, "seed", int, None),
        "num_choices": get_number(body, "n", int, 1, low=1, high=MAX_CHOICES),
        "is_stream": get_field(body, "stream", bool, False),
        "has_stream_usage": _has_stream_usage(body),
        "has_logprobs": has_logprobs,
        "has_token_ids": get_field(body, "return_token_ids", bool, False),
        "model": get_field(body, "model", str, None),
    }


def _parse_prompts(raw: Any) -> tuple[str | tuple[int, ...], ...]:
    """Text, token ids, or a list of either."""
    prompts = raw if isinstance(raw, list) and not all(type(each) is int for each in raw) else [raw]
    for prompt in prompts:
        if not prompt or not (isinstance(prompt, str) or _is_token_ids(prompt)):
            raise RequestError(
                "prompt must be text, token ids, or a list of either, none of them empty", param="prompt"
            )
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < MAX_NUMBER for each in value)


class RequestParser:
    """Parses the bodies of chat requests for one chat template.

    Requests of an agent, and of all agents of a run, repeat everything but the messages, so what is parsed of the other
    fields is cached by their content.
    """

    def __init__(self, uses_variable: Callable[[str], bool]) -> None:
        """`uses_variable`: whether the chat template refers to a variable."""
        self._uses_variable = uses_variable
        self._options: OrderedDict[tuple[bytes, Sampling], ChatRequest] = OrderedDict()
        """Requests without messages, least recently used first."""

    def parse(
        self, body: Any, defaults: Sampling, *, parse_messages: Callable[[Any], tuple[Message, ...]] = parse_messages
    ) -> ChatRequest:
        """The request; raises `RequestError`. `parse_messages` parses its messages."""
        if not isinstance(body, dict):
            raise RequestError("the request body must be a JSON object")
        fields = {**body, "messages": None}
        cache_key = build_cache_key(fields)
        key = None if cache_key is None or len(cache_key) > MAX_CACHED_BYTES else (cache_key, defaults)
        request = None if key is None else self._options.get(key)
        if request is None:
            _refuse_unsupported(body, CHAT_FIELDS, allowed=CONTINUATION_FIELDS)
        messages = _parse_field("messages", parse_messages, body.get("messages"))
        messages, reply_start = _split_reply_start(body, messages)
        if request is None:
            request = _parse_options(fields if key is None else load_cache_key(key[0]), defaults, self._uses_variable)
            if key is not None:
                self._cache(key, request)
        if reply_start and request.tool_choice == "required":
            raise RequestError("tool_choice cannot force a call in a reply that is continued", param="tool_choice")
        prompt = replace(request.prompt, messages=messages, reply_start=reply_start)
        return replace(request, prompt=prompt)

    def _cache(self, key: tuple[bytes, Sampling], request: ChatRequest) -> None:
        self._options[key] = request
        if len(self._options) > NUM_CACHED_OPTIONS:
            self._options.popitem(last=False)


def _parse_options(body: Any, defaults: Sampling, uses_variable: Callable[[str], bool]) -> ChatRequest:
    """All fields but the messages."""
    prompt = Prompt(
        messages=(),
        tools=_parse_field("tools", parse_tools, body.get("tools")),
        variables=_parse_variables(body, uses_variable),
    )
    tool_choice, forced_tool = _parse_tool_choice(body.get("tool_choice"), prompt.tools)
    has_logprobs = get_field(body, "logprobs", bool, False)
    num_top = get_number(body, "top_logprobs", int, 0, low=0, high=MAX_TOP_LOGPROBS)
    if num_top and not has_logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    shared = _parse_shared(body, defaults, num_top=num_top, has_logprobs=has_logprobs)
    constraint = shared["constraint"]
    if constraint is not None and tool_choice == "required":
        raise RequestError(
            f"tool_choice forces a tool call, and {constraint.param} constrains the text of a reply without one: give "
            "only one of them", param=constraint.param,
        )  # fmt: skip
    return ChatRequest(
        prompt=prompt,
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        strict_tools=_find_strict(body.get("tools") or ()),
        is_single_call=bool(prompt.tools)
        and (forced_tool is not None or get_field(body, "parallel_tool_calls", bool, True) is False),
        keeps_stop=get_field(body, "include_stop_str_in_output", bool, False),
        has_reasoning_field=get_field(body, "separate_reasoning", bool, True),
        **shared,
    )


def _split_reply_start(body: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """With `continue_final_message`, the messages before the last, and the last one's text."""
    is_continued = get_field(body, "continue_final_message", bool, False)
    if get_field(body, "add_generation_prompt", bool, not is_continued) == is_continued:
        raise RequestError(
            "add_generation_prompt must be the opposite of continue_final_message, as the reply either begins after "
            "the last message or continues it",
            param="add_generation_prompt",
        )
    if not is_continued:
        return messages, ""
    last = messages[-1]
    if len(messages) == 1 or last.role != "assistant" or last.tool_calls or last.reasoning:
        raise RequestError(
            "continue_final_message needs a last message of the assistant, after others, with content alone",
            param="continue_final_message",
        )
    return messages[:-1], last.content


def _refuse_unsupported(
    body: Mapping[str, Any], own_fields: frozenset[str], *, allowed: frozenset[str] = frozenset()
) -> None:
    unknown = body.keys() - own_fields - SHARED_FIELDS - EXTENDED_FIELDS - INERT_FIELDS - NEUTRAL_VALUES.keys()
    for key in sorted(map(str, unknown)):
        if body.get(key) is not None:
            raise RequestError(f"{key} is not a field of this endpoint; leave it out", param=key)
    for key in sorted((NEUTRAL_VALUES.keys() & body.keys()) - allowed):
        value = body[key]
        if value is not None and value not in NEUTRAL_VALUES[key]:
            raise RequestError(f"{key}={shorten(value)} is not supported by this endpoint; leave it out", param=key)


def _has_stream_usage(body: Mapping[str, Any]) -> bool:
    options = get_field(body, "stream_options", dict, {})
    for key, value in options.items():
        if key not in STREAM_OPTIONS and value:
            raise RequestError(f"stream_options.{key} is not supported; leave it out", param="stream_options")
    return bool(options.get("include_usage"))


def _parse_field(param: str, parse: Callable[[Any], Any], raw: Any) -> Any:
    try:
        return parse(raw)
    except ValueError as error:
        raise RequestError(str(error), param=param) from error


def _parse_variables(body: Mapping[str, Any], uses_variable: Callable[[str], bool]) -> tuple[tuple[str, Any], ...]:
    variables = dict(get_field(body, "chat_template_kwargs", dict, {}))
    effort = get_field(body, "reasoning_effort", str, None)
    if effort is not None:
        if not uses_variable("reasoning_effort"):
            raise RequestError("reasoning_effort is not used by this model's chat template", param="reasoning_effort")
        variables["reasoning_effort"] = effort
    if not all(isinstance(name, str) and name.isidentifier() for name in variables):
        raise RequestError("chat_template_kwargs must name template variables", param="chat_template_kwargs")
    reserved = variables.keys() & {"messages", "tools", "conversation", "tokenize", "add_generation_prompt"}
    if reserved:
        raise RequestError(f"chat_template_kwargs cannot set {sorted(reserved)}", param="chat_template_kwargs")
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


def _parse_bad_words(body: Mapping[str, Any]) -> tuple[str, ...]:
    words = get_field(body, "bad_words", list, [])
    if len(words) > MAX_BAD_WORDS or not all(isinstance(word, str) and word for word in words):
        raise RequestError(f"bad_words must be a list of at most {MAX_BAD_WORDS} non-empty texts", param="bad_words")
    return tuple(words)


def _find_strict(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Names of the tools that are declared `strict`; the tools are valid."""
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
