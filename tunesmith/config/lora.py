"""Knobs of a LoRA adapter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tunesmith.config.section import Section


class LoraSection(Section):
    """A low-rank adapter (LoRA; Hu et al., 2021) trained on frozen base weights."""

    r: int = Field(default=16, ge=1)
    """Rank; raise it if the adapter underfits. A loaded adapter keeps its own."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / r. A loaded adapter keeps its own."""
    target_modules: Literal["attention", "all-linear"] | tuple[str, ...] = "attention"
    """Layers to adapt: attention (its projections), all-linear (all linear layers but the head), or a list of layer
    names."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapter's inputs; raise it (0.05) against overfitting. Supervised fine-tuning only:
    reinforcement learning must train the function that it samples from."""
    quantization: Literal["none", "nf4"] = "none"
    """Storage of the base weights: nf4 uses 4 bits each with double quantization (QLoRA; Dettmers et al., 2023). Set it
    if the base does not fit in memory."""
    seed: int = Field(default=0, ge=0)
    """Seed of a new adapter's initialization. A new adapter's output is zero."""


def refuse_dropout(lora: LoraSection | None, reason: str) -> None:
    """Raise ValueError if dropout is set for training whose forward must match forwards outside of it."""
    if lora is not None and lora.dropout > 0:
        raise ValueError(f"model.lora.dropout={lora.dropout:g} is for supervised fine-tuning: {reason}; set it to 0")
