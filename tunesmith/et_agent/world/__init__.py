"""A fictional world to train agents in that search and compute: documents, and questions with verifiable answers."""

from tunesmith.et_agent.world.config import WorldConfig
from tunesmith.et_agent.world.world import World, generate

__all__ = ["World", "WorldConfig", "generate"]
