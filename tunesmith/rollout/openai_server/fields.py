"""The fields of completion requests that have a meaning here; any other field is refused, never ignored."""

from __future__ import annotations

from typing import Any

CHAT_FIELDS = frozenset({
    "chat_template_kwargs", "logprobs", "max_completion_tokens", "messages", "parallel_tool_calls", "reasoning_effort",
    "separate_reasoning", "tool_choice", "tools",
})  # fmt: skip
TEXT_FIELDS = frozenset({"add_special_tokens", "logprobs", "prompt"})
SHARED_FIELDS = frozenset({
    "ignore_eos", "logit_bias", "max_completion_tokens", "max_tokens", "min_p", "model", "n", "return_token_ids",
    "seed", "stop", "stop_token_ids", "stream", "stream_options", "temperature", "top_k", "top_p",
})  # fmt: skip
EXTENDED_FIELDS = frozenset({
    "add_generation_prompt", "bad_words", "continue_final_message", "frequency_penalty", "guided_choice",
    "guided_grammar", "guided_json", "guided_regex", "min_tokens", "presence_penalty", "repetition_penalty",
    "response_format", "return_entropy", "structured_outputs", "top_logprobs",
})  # fmt: skip
"""Fields that a request parser reads or refuses by value."""
INERT_FIELDS = frozenset({
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
})  # fmt: skip
"""Fields of the API that change nothing in what is sampled: who asks, how it is billed, stored or sped up."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Unsupported options -> values that are accepted because they have no effect; null is always accepted."""

CONTINUATION_FIELDS = frozenset({"add_generation_prompt", "continue_final_message", "include_stop_str_in_output"})
"""Options of `NEUTRAL_VALUES` that chat requests may set."""
