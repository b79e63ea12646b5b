"""Former place of the fictional world, `recipes/world` of the repository, for programs that import it from here."""

from __future__ import annotations

import importlib
import pkgutil
import sys

try:
    world = importlib.import_module("recipes.world")
except ModuleNotFoundError as error:
    if error.name not in {"recipes", "recipes.world"}:
        raise
    raise ImportError("the world is recipes.world now: run in the root of a clone of Tunesmith's repository") from error
for each in pkgutil.iter_modules(world.__path__):
    sys.modules[f"{__name__}.{each.name}"] = importlib.import_module(f"recipes.world.{each.name}")
sys.modules[__name__] = world
