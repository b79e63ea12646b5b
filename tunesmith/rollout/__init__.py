"""Rollouts: agents talk to an OpenAI-compatible endpoint, and every token that the policy samples is recorded."""
