"""A fictional world to train agents in that search and compute: documents, and questions with verifiable answers."""

from recipes.world.config import WorldConfig
from recipes.world.world import World, generate

__all__ = ["World", "WorldConfig", "generate"]
