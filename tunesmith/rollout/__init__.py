"""Rollouts: agents call the policy through an OpenAI-compatible endpoint that records every sampled token."""
