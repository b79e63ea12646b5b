"""The Tinker service's settings of an adapter, which AgentScope and Trinity-RFT have; it is trained in this process."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tunesmith.errors import ConfigError

logger = logging.getLogger(__name__)

MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")


class TinkerConfig(BaseModel):
    """A LoRA adapter, with the fields that AgentScope passes to the Tinker service; it is trained in this process."""

    model_config = ConfigDict(extra="forbid")

    rank: int = Field(default=16, ge=1)
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None

    def get_config(self) -> dict[str, Any]:
        """The fields, by name."""
        return self.model_dump()


def translate_adapter(adapter: TinkerConfig) -> dict[str, Any]:
    """Fields of our `model.lora` section. The head is not adapted, whatever `train_unembed` says."""
    key = "model.tinker_config"
    if adapter.base_url is not None:
        raise ConfigError(f"{key}.base_url={adapter.base_url!r} is not supported: the adapter trains in this process")
    if not (adapter.train_attn or adapter.train_mlp):
        raise ConfigError(f"{key} must have train_attn or train_mlp: the head alone cannot be adapted")
    if adapter.train_unembed and "train_unembed" in adapter.model_fields_set:
        logger.warning("%s.train_unembed has no effect: an adapter does not change the head", key)
    layers: Any = "all-linear" if adapter.train_attn else MLP_LAYERS
    section = {"r": adapter.rank, "target_modules": layers if adapter.train_mlp else "attention"}
    return section if adapter.seed is None else section | {"seed": adapter.seed}
