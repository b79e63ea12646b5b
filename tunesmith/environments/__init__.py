"""Environments of tool agents: one loop for prompting, rollouts, training and evaluation.

`play` is the loop of environments that have tasks and rewards of their own.
"""

from __future__ import annotations

from tunesmith.environments.environment import Environment
from tunesmith.environments.episode import Reply, TaskEnvironment, TextEnvironment, play
from tunesmith.environments.tool_agent import tool_agent
from tunesmith.environments.transcript import Segment, Transcript

__all__ = ["Environment", "Reply", "Segment", "TaskEnvironment", "TextEnvironment", "Transcript", "play", "tool_agent"]
