"""AdamW of a model whose decoder layers are sharded over ranks (`sharded_model`).

A rank's rows of a layer's parameter are its master, its gradient and its moments; the backward pass has summed the
gradient over ranks. Embeddings, head and final norm are updated as by `ShardedAdamW`. States are those of one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tunesmith.cluster.ranks import Ranks
from tunesmith.config import TrainerSection
from tunesmith.trainer.optimizer import MasterAdamW, pop_tensor
from tunesmith.trainer.sharding.sharded_adamw import ShardedAdamW
from tunesmith.trainer.sharding.sharded_model import count_rows, cut_rows, find_sharding, get_local, is_narrow


class ShardedLayersAdamW(ShardedAdamW):
    """`ShardedAdamW` of a model with sharded layers."""

    def __init__(self, model: PreTrainedModel, settings: TrainerSection, ranks: Ranks) -> None:
        self._model = model
        super().__init__(model, settings, ranks, has_sharded_gradients=False)

    def _list_whole(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self._parameters.items() if not isinstance(each, DTensor)}

    def _build_part(self, name: str, *, seed: int) -> Tensor:
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return super()._build_part(name, seed=seed)
        return get_local(parameter).requires_grad_()

    def _restore_master(self, name: str, state: dict[str, Tensor]) -> None:
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            super()._restore_master(name, state)
        elif self._has_master(name):
            self._masters[name].copy_(self._cut(name, pop_tensor(state, f"master:{name}", parameter)))

    @torch.no_grad()
    def _reduce_gradients(self) -> None:
        super()._reduce_gradients()
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                self._masters[name].grad = None if parameter.grad is None else get_local(parameter.grad)
                parameter.grad = None

    def _has_master(self, name: str) -> bool:
        return is_narrow(self._model, self._parameters[name])

    def _count_part(self, name: str) -> int:
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return super()._count_part(name)
        return count_rows(parameter, self._ranks.world_size) * parameter[:1].numel()

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return super()._cut(name, whole)
        return cut_rows(whole, parameter, self._ranks.rank)


def build_optimizer(
    model: nn.Module, settings: TrainerSection, ranks: Ranks, *, has_sharded_gradients: bool | None = None
) -> MasterAdamW:
    """The optimizer of this rank."""
    if ranks.is_alone:
        return MasterAdamW(model, settings)
    if isinstance(model, PreTrainedModel) and find_sharding(model) is not None:
        return ShardedLayersAdamW(model, settings, ranks)
    return ShardedAdamW(model, settings, ranks, has_sharded_gradients=has_sharded_gradients)
