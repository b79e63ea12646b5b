"""What the server of the vLLM engine uses of vLLM, without a model: each token is the one before plus one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__version__ = "0.26.0"


def SamplingParams(**options: Any) -> SimpleNamespace:  # noqa: N802 - vLLM's name
    return SimpleNamespace(**options)
