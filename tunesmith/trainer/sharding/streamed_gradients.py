"""Gradients that are summed over ranks while the backward pass makes them.

A rank then holds float32 gradients of its own parts only, and 16-bit gradients of one bucket. Embeddings and head,
whose gradients are made in several pieces of a row, are summed after the last row (`ShardedAdamW`).

Collectives have no names: the n-th call of one rank meets the n-th call of the others. So every rank reduces all
buckets once for each row, in the order of the buckets, whatever the order in which its gradients become complete; a
rank that has fewer rows adds zeros. With two buckets, two rows on rank 0 and one on rank 1:

    rank 0   begin_update(2)   row 1: buckets 0, 1   row 2: buckets 0, 1    end_update
    rank 1   begin_update(1)   row 1: buckets 0, 1   end_update: buckets 0, 1 of zeros

A rank waits where the other has not yet come to the same bucket, so rows of equal cost keep both busy (`packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.cluster.ranks import Ranks, wait_for
from tunesmith.model.memory import STREAMED_FRACTION
from tunesmith.trainer.sharding.buckets import Bucket, build_buckets, pack_gradients


class StreamedGradients:
    """This rank's parts of the gradients of an update."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._buckets = build_buckets(parameters, ranks.world_size)
        self._ready: set[str] = set()
        self._num_launched = 0
        self._pending: tuple[Any, Bucket, Tensor, Tensor] | None = None
        """The bucket that is being reduced, with its tensors."""
        self._num_rows = 0
        """Rows of this update that are left on the rank with the most."""
        self.totals: dict[str, Tensor] = {}
        """Parts of the sum over ranks and rows, by name of the parameter."""
        self.used: set[str] = set()
        """Parameters that had a gradient on this rank."""
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def begin_update(self, num_rows: int) -> None:
        """Start with no gradient; this rank will pass `num_rows` rows."""
        self.clear()
        self._num_rows = max(self._ranks.all_gather_objects(num_rows))

    def end_row(self) -> None:
        """After the backward of a row: reduce the buckets that are left, those of parameters without a gradient."""
        while self._num_launched < len(self._buckets):
            self._launch()
        self._add_reduced()
        self._ready.clear()
        self._num_launched = 0
        self._num_rows -= 1

    def end_update(self, after_row: Callable[[], None]) -> None:
        """After the last row of this rank: take part in the remaining rows of others; `after_row` as on these ranks."""
        while self._num_rows > 0:
            self.end_row()
            after_row()

    def clear(self) -> None:
        self.totals.clear()
        self.used.clear()

    def _add(self, name: str, parameter: Tensor) -> None:
        """The gradient of a parameter is complete for this row.

        Autograd calls this within the backward pass, which goes on while the bucket is reduced. A complete bucket waits
        for those before it: ranks must reduce in the same order.
        """
        self._ready.add(name)
        self.used.add(name)
        while self._num_launched < len(self._buckets):
            if not self._ready.issuperset(self._buckets[self._num_launched]):
                return
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        bucket = self._buckets[self._num_launched]
        self._num_launched += 1
        whole_RS = pack_gradients(bucket, self._parameters, self._ranks.world_size)
        shard_S = torch.empty_like(whole_RS[0])
        work = self._ranks.reduce_scatter(shard_S, whole_RS.view(-1))
        # only now wait for the bucket before: two at a time bound the memory, and one is always on its way
        self._add_reduced()
        self._pending = (work, bucket, shard_S, whole_RS)

    def _add_reduced(self) -> None:
        """Add the bucket that was reduced last to the totals."""
        if self._pending is None:
            return
        work, bucket, shard_S, _ = self._pending
        wait_for(work)
        for name, gradient in zip(bucket, shard_S.split(list(bucket.values())), strict=True):
            if name in self.totals:
                self.totals[name] += gradient
            else:
                self.totals[name] = gradient.clone()
        self._pending = None


def find_streamed(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], ranks: Ranks, *, requested: bool | None
) -> dict[str, nn.Parameter]:
    """The parameters whose gradients are streamed: none, or all but those of embeddings and head.

    `requested` None: those of a model whose float32 gradients would take more than `STREAMED_FRACTION` of the device.
    """
    if ranks.is_alone or not isinstance(model, PreTrainedModel):
        return {}
    if requested is None:
        device = torch.device(ranks.device)
        num_bytes = 4 * sum(parameter.numel() for parameter in parameters.values())
        is_cuda = device.type != "cpu"
        requested = is_cuda and num_bytes > STREAMED_FRACTION * torch.cuda.get_device_properties(device).total_memory
    if not requested:
        return {}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    late = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) not in late}
