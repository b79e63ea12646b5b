"""A fictional world to train agents in that search and compute: documents, and questions with verifiable answers."""

from tunesmith.tasks.world.config import WorldConfig
from tunesmith.tasks.world.world import World, generate

__all__ = ["World", "WorldConfig", "generate"]
