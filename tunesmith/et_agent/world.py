"""Former place of the fictional world, `recipes/world` of the repository, for programs that import it from here."""

from __future__ import annotations

import importlib
import pkgutil
import sys

try:
    world = importlib.import_module("recipes.world")
except ModuleNotFoundError as error:
    raise ImportError(
        "the fictional world is in recipes/world of Tunesmith's repository: run in the root of a clone, and import "
        "recipes.world"
    ) from error
for each in pkgutil.iter_modules(world.__path__):
    sys.modules[f"{__name__}.{each.name}"] = importlib.import_module(f"recipes.world.{each.name}")
sys.modules[__name__] = world
