"""Routes of experts for tests: random ones, and models that are forced to use them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from tunesmith.model.experts import find_routers
from tunesmith.types import Sample


def route_by_prefix(samples: Sequence[Sample], *, num_layers: int = 3, num_experts: int = 8) -> list[Sample]:
    """The samples with random routes of two experts, which depend on a token and those before it."""
    return [replace(sample, routes=_draw_routes(sample.token_ids, num_layers, num_experts)) for sample in samples]


def _draw_routes(token_ids: Sequence[int], num_layers: int, num_experts: int) -> np.ndarray:
    draws = [random.Random(str(token_ids[: end + 1])) for end in range(len(token_ids))]
    return np.array([[rng.sample(range(num_experts), 2) for _ in range(num_layers)] for rng in draws], dtype=np.int8)


def compute_softmax_gates(logits: Tensor, chosen: Tensor) -> Tensor:
    """Qwen3-MoE with `norm_topk_prob`: probabilities of the chosen experts, divided by their sum."""
    scores = logits.softmax(-1).gather(1, chosen)
    return scores / scores.sum(-1, keepdim=True)


def compute_sigmoid_gates(logits: Tensor, chosen: Tensor) -> Tensor:
    """GLM-4.x with `norm_topk_prob` and a factor of 1, and MiniMax-M2."""
    scores = logits.sigmoid().gather(1, chosen)
    return scores / scores.sum(-1, keepdim=True)


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "qwen3_moe": compute_softmax_gates,
    "gpt_oss": compute_softmax_gates,
    "glm4_moe": compute_sigmoid_gates,
    "glm4_moe_lite": compute_sigmoid_gates,
}


class ForcedRoutes:
    """Replaces what the routers of a model return by `routes` [T, L, K] and gates of a formula; keeps the logits."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.routes: Tensor | None = None
        self.logits: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self._gates = GATES[name]
        for layer, router in enumerate(find_routers(model)):
            router.register_forward_hook(lambda _module, _inputs, output, layer=layer: self._replace(layer, output))

    def _replace(self, layer: int, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, chosen = output
        self.logits.append(logits)
        self.chosen.append(chosen)
        if self.routes is None:
            return output
        chosen = self.routes[: len(logits), layer].long()
        return logits, self._gates(logits, chosen).to(gates.dtype), chosen


def run_forced(model: nn.Module, forced: ForcedRoutes, sample: Sample) -> Tensor:
    """Logits [T, V] of a plain forward of the sample with its routes."""
    forced.routes = torch.from_numpy(sample.routes)
    return model(input_ids=torch.tensor([sample.token_ids])).logits[0]
