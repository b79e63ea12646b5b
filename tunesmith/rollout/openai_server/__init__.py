"""The OpenAI-compatible endpoint: requests in, recorded completions out."""
