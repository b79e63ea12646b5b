"""Every knob of an adapter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tunesmith.config.section import Section


class LoraSection(Section):
    """A low-rank adapter (LoRA; Hu et al., 2021) that is trained while the weights under it stay as they are."""

    r: int = Field(default=16, ge=1)
    """Rank; raise it where an adapter learns too little. An adapter that is loaded has its own."""
    alpha: float = Field(default=32.0, gt=0)
    """What the adapter adds is scaled by alpha / r. An adapter that is loaded has its own."""
    target_modules: Literal["attention", "all-linear"] | tuple[str, ...] = "attention"
    """Layers that get one: the projections of attention, all linear layers but the head, or a list of layer names."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that training zeroes at random; raise it (0.05) against overfitting. Supervised
    fine-tuning only: reinforcement learning trains the function that it samples from."""
    quantization: Literal["none", "nf4"] = "none"
    """How the weights under it are held: nf4 takes 4 bits for each, doubly quantised (QLoRA; Dettmers et al., 2023)."""
    seed: int = Field(default=0, ge=0)
    """Fixes the first values of a new adapter, which change nothing before it is trained."""


def refuse_dropout(lora: LoraSection | None, reason: str) -> None:
    """Raise a ValueError where training must compute what is computed outside of it, and dropout is asked for."""
    if lora is not None and lora.dropout > 0:
        raise ValueError(f"model.lora.dropout={lora.dropout:g} is for supervised fine-tuning: {reason}; set it to 0")
