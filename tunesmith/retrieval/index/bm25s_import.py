"""Import bm25s without JAX.

Where JAX is installed, bm25s runs one of its operations when it is imported. On a machine with a GPU, JAX then reserves
three quarters of the memory, which the model needs; and this package selects the best passages itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tunesmith.errors import ConfigError

JAX = ("jax", "jax.lax")


def import_bm25s() -> ModuleType:
    """The package bm25s, its stop words loaded.

    Raises:
        ConfigError: bm25s is not installed.
    """
    try:
        with hidden_modules(JAX):
            importlib.import_module("bm25s.stopwords")
            return importlib.import_module("bm25s")
    except ImportError as error:
        raise ConfigError("BM25 needs bm25s: pip install 'tunesmith[retrieval]'") from error


@contextmanager
def hidden_modules(names: tuple[str, ...]) -> Iterator[None]:
    """Within, imports of these modules fail; modules that are loaded already stay loaded."""
    loaded = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type] # None makes an import raise ImportError
    try:
        yield
    finally:
        for name, module in loaded.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
