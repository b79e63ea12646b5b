"""The fields of completion requests that have a meaning here; any other field is refused, never ignored."""

from __future__ import annotations

CHAT_FIELDS = frozenset({
    "chat_template_kwargs", "logprobs", "max_completion_tokens", "messages", "parallel_tool_calls", "reasoning_effort",
    "tool_choice", "tools",
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
