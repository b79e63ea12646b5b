"""Operations that torch's compiler takes as one and does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define_op(schema: str, *, build: Callable[..., Any], run: Callable[..., Any] | None = None) -> Any:
    """The operation `tunesmith::<schema>`. `build` makes outputs without values, for tracing; `run` computes them on
    every device for which no kernel is registered (None: there are only kernels)."""
    name = schema.partition("(")[0]
    torch.library.define(f"tunesmith::{name}", schema.removeprefix(name), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"tunesmith::{name}", build)
    if run is not None:
        torch.library.impl(f"tunesmith::{name}", "default", run)
    return getattr(torch.ops.tunesmith, name).default
