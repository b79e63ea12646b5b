"""OpenAI's Responses API as a translation to chat completions and back."""
