"""Environments of tool agents: one loop for prompting, rollouts, training and evaluation."""

from __future__ import annotations

from tunesmith.environments.environment import Environment
from tunesmith.environments.tool_agent import tool_agent
from tunesmith.environments.transcript import Segment, Transcript

__all__ = ["Environment", "Segment", "Transcript", "tool_agent"]
