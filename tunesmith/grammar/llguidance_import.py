"""The optional package llguidance."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tunesmith.errors import ConfigError


def has_llguidance() -> bool:
    """Whether replies can be constrained by grammars."""
    return find_spec("llguidance") is not None


def load_llguidance() -> Any:
    """The package, with its adapter for transformers' tokenizers."""
    if not has_llguidance():
        raise ConfigError("grammars need llguidance: pip install 'tunesmith[grammar]'")
    import llguidance.hf  # optional

    return llguidance
