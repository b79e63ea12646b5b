"""Rollout data: samples and tries, operators on groups, dynamic sampling, replay, files. No tensors."""
