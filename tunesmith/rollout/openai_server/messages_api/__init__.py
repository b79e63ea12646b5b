"""Anthropic's Messages API as a translation to chat completions and back."""
