"""AdamW whose float32 masters and moments are sharded over ranks (ZeRO stage 2; Rajbhandari et al., 2020).

Every rank holds all parameters, which the sampler reads. Each parameter is cut into as many equal parts as there are
ranks, padded with zeros; a rank holds the master and the moments of its part. An update on every rank:

    1. which parameters have a gradient on some rank       objects gathered
    2. sums of the gradients, a part to each rank          reduce-scatter, bucket by bucket
    3. norm of the whole gradient                          sum of one number
    4. AdamW on the own parts                              no communication
    5. the new parameters, in place                        all-gather, bucket by bucket

All ranks pass through these in the same order, so a rank waits in 1 for the slowest. Buckets hold parameters in reverse
order, which is about the order of the backward pass.

A parameter of a sharded layer (`sharded_model`) has the same layout: a rank holds whole rows of it, which are one range
of its elements. These rows are the master, their gradient has been summed by the backward pass, and nothing has to be
gathered, so such parameters are in no bucket. A state is saved as that of a single rank, whatever the layout, so a run
resumes on any number of ranks.

Axes: R ranks, S elements of a rank's part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tunesmith.cluster.ranks import Ranks
from tunesmith.config import TrainerSection
from tunesmith.trainer.optimizer import (
    NUM_SAMPLED_ELEMENTS,
    NUM_SAMPLED_MATRICES,
    MasterAdamW,
    build_adamw,
    build_master,
    find_trainable,
    pop_tensor,
)
from tunesmith.trainer.sharding.buckets import Bucket, build_buckets, finish_one_behind, pack_gradients, pad_flat
from tunesmith.trainer.sharding.sharded_model import get_local, is_narrow
from tunesmith.trainer.sharding.streamed_gradients import StreamedGradients, find_streamed

WAITING, COMMUNICATION = "perf/train_wait_s", "perf/communication_s"
"""Metrics of collectives without data, whose time is that of the slowest rank, and of work that moves gradients or
weights between ranks, and packs them."""


class CollectiveTimes:
    """Time that a rank waits for others and communicates within updates; on a GPU without synchronizing.

    The host may be ahead of the GPU: an interval that has not ended there is reported with those of the next step.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._intervals: list[tuple[str, Any, Any]] = []

    def take(self) -> dict[str, float]:
        """Sums of the intervals that have ended since the last call, in seconds."""
        times = {WAITING: 0.0, COMMUNICATION: 0.0}
        pending = []
        for name, start, end in self._intervals:
            if not self._is_cuda:
                times[name] += end - start
            elif end.query():
                times[name] += start.elapsed_time(end) / 1000
            else:
                pending.append((name, start, end))
        self._intervals = pending
        return times

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """The time of the work within is added to a metric."""
        start = self._mark()
        yield
        self._intervals.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class ShardedAdamW(MasterAdamW):
    """`MasterAdamW` on several ranks: equal updates, with optimizer state divided by the number of ranks."""

    def __init__(
        self, model: nn.Module, settings: TrainerSection, ranks: Ranks, *, has_sharded_gradients: bool | None = None
    ) -> None:
        self._model, self._ranks = model, ranks
        self._parameters = find_trainable(model)
        self._sharded = {name: each for name, each in self._parameters.items() if isinstance(each, DTensor)}
        is_streaming = False if self._sharded else has_sharded_gradients
        self._streamed = find_streamed(model, self._parameters, ranks, requested=is_streaming)
        self.stream = StreamedGradients(self._streamed, ranks) if self._streamed else None
        self._masters = {name: self._build_part(name, seed=seed) for seed, name in enumerate(self._parameters)}
        self._times = CollectiveTimes(ranks.device)
        whole = {name: each for name, each in self._parameters.items() if name not in self._sharded}
        self._buckets = build_buckets(whole, ranks.world_size)
        self._adamw = build_adamw(settings, self._parameters, self._masters)

    def clear_gradients(self) -> None:
        super().clear_gradients()
        if self.stream is not None:
            self.stream.clear()

    def compute_grad_norm(self) -> Tensor:
        """Sum the gradients over ranks, which frees them, and return the norm of the sum.

        The norm is that of the summed gradient, so all ranks clip by the same factor and stay equal.
        """
        # a collective without data first: the time that this rank waits for the slowest is not that of moving data
        with self._times.measured(WAITING):
            self._ranks.add(torch.zeros(1, device=self._ranks.device))
        with self._times.measured(COMMUNICATION):
            self._reduce_gradients()
        # parts of different ranks are disjoint, padding is zero: the squares of their norms add up
        shards = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(shards).double().to(self._ranks.device)
        return self._ranks.add(norm.square()).sqrt()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._times = CollectiveTimes(self._ranks.device)  # reading a checkpoint is no communication of a step

    def take_times(self) -> dict[str, float]:
        """Seconds since the last call in which this rank waited for the others' gradients, and communicated."""
        return self._times.take()

    @torch.no_grad()
    def sample_weights(self) -> list[Tensor]:
        """As `MasterAdamW.sample_weights`: the same elements of the whole masters, on every rank."""
        names = [name for name, p in self._parameters.items() if p.ndim >= 2] or list(self._parameters)
        chosen, parts = names[:: -(-len(names) // NUM_SAMPLED_MATRICES)], []
        for name in chosen:
            master, num_elements = self._masters[name], self._parameters[name].numel()
            index_N = torch.arange(0, num_elements, -(-num_elements // NUM_SAMPLED_ELEMENTS), device=master.device)
            place_N = index_N - self._ranks.rank * self._count_part(name)
            is_own_N = (place_N >= 0) & (place_N < master.numel())
            part = master.detach().flatten() if master.numel() else master.new_zeros(1)
            parts.append(part[place_N.clamp(0, len(part) - 1)].double().where(is_own_N, 0.0))
        whole = self._ranks.add(torch.cat(parts))
        return list(whole.split([len(part) for part in parts]))

    def state_dict(self) -> dict[str, Tensor]:
        """As `MasterAdamW.state_dict`, gathered from all ranks to the CPU of the first; empty on the others.

        All ranks must call it.
        """
        state = super().state_dict()
        return state if self._ranks.is_first else {}

    @torch.no_grad()
    def _reduce_gradients(self) -> None:
        """Set each master's gradient to its part of the sum over ranks; parameters that no rank used have none."""
        has_gradient = self._find_used()

        def start() -> Iterator[tuple[Any, tuple[Bucket, Tensor, Tensor]]]:
            for bucket in self._buckets:
                used = {
                    name: size for name, size in bucket.items() if name in has_gradient and name not in self._streamed
                }
                if used:
                    whole_RS = pack_gradients(used, self._parameters, self._ranks.world_size)
                    shard_S = torch.empty_like(whole_RS[0])
                    work = self._ranks.reduce_scatter(shard_S, whole_RS.view(-1))
                    yield work, (used, shard_S, whole_RS)

        for used, shard_S, _ in finish_one_behind(start()):
            for name, gradient in zip(used, shard_S.split(list(used.values())), strict=True):
                self._masters[name].grad = gradient
        if self.stream is not None:
            for name, gradient in self.stream.totals.items():
                self._masters[name].grad = gradient if name in has_gradient else None
        for name, parameter in self._sharded.items():
            self._masters[name].grad = None if parameter.grad is None else get_local(parameter.grad)
            parameter.grad = None

    def _find_used(self) -> set[str]:
        """Names of parameters that have a gradient on some rank.

        All ranks must agree on them: they decide which collectives follow, and AdamW would decay the weights and the
        moments of a parameter with a gradient of zeros, but not those of one without.
        """
        streamed = self.stream.used if self.stream is not None else set()
        used = bytes(parameter.grad is not None or name in streamed for name, parameter in self._parameters.items())
        gathered = self._ranks.all_gather_objects(used)
        return {name for name, *flags in zip(self._parameters, *gathered, strict=True) if any(flags)}

    @torch.no_grad()
    def _write_back(self) -> None:
        """Round the masters into the parameters of every rank, in place."""

        def start() -> Iterator[tuple[Any, tuple[Bucket, Tensor, Tensor]]]:
            for bucket in self._buckets:
                dtype = self._parameters[next(iter(bucket))].dtype  # rounded before it is sent: half the bytes
                shard_S = torch.cat([self._masters[name].detach() for name in bucket]).to(dtype)
                whole = shard_S.new_empty(self._ranks.world_size * len(shard_S))
                yield self._ranks.all_gather(whole, shard_S, is_async=True), (bucket, whole, shard_S)

        with self._times.measured(COMMUNICATION):
            for bucket, whole, _ in finish_one_behind(start()):
                whole_RS = whole.view(self._ranks.world_size, -1)
                for name, values_RS in zip(bucket, whole_RS.split(list(bucket.values()), dim=1), strict=True):
                    parameter = self._parameters[name]
                    if parameter.numel() == values_RS.numel() and parameter.is_contiguous():
                        parameter.data.view_as(values_RS).copy_(values_RS)
                    else:  # padded, or laid out in another order
                        parameter.data.copy_(values_RS.reshape(-1)[: parameter.numel()].view_as(parameter))

    def _has_master(self, name: str) -> bool:
        return is_narrow(self._model, self._parameters[name])

    def _build_part(self, name: str, *, seed: int) -> Tensor:
        """This rank's part of the master of a parameter; whole parameters become those of the first rank, by one
        broadcast each, in the same order on all ranks."""
        parameter = self._parameters[name]
        if name in self._sharded:
            return get_local(parameter).requires_grad_()
        self._ranks.broadcast(parameter.data)
        whole = build_master(parameter, seed=seed).detach()
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype if name in self._streamed else whole.dtype
        return self._cut(name, whole).clone().requires_grad_()

    def _restore_master(self, name: str, state: dict[str, Tensor]) -> None:
        """Set a master from the state, which loses it, or from its parameter, if that has no separate master."""
        parameter = self._parameters[name]
        if self._has_master(name):
            self._masters[name].copy_(self._cut(name, pop_tensor(state, f"master:{name}", parameter)))
        elif name not in self._sharded:  # the rows of a sharded parameter are its master
            self._masters[name].copy_(self._cut(name, parameter.detach()))

    def _count_part(self, name: str) -> int:
        """Elements of a parameter before which a rank's part starts, for each rank before it."""
        parameter = self._parameters[name]
        unit = parameter[:1].numel() if name in self._sharded else 1  # FSDP2 divides rows
        return -(-parameter.numel() // (unit * self._ranks.world_size)) * unit

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the parameter's shape: rows, or flat and padded with zeros."""
        size = self._count_part(name)
        part = whole.flatten()[self._ranks.rank * size : (self._ranks.rank + 1) * size]
        return part.view_as(self._masters[name]) if name in self._sharded else pad_flat(part, size)

    def _gather(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor of a part, on the CPU of the first rank; empty on the others."""
        if part.ndim == 0:  # the number of steps, the same on all ranks
            return part.detach().cpu().clone()
        parameter = self._parameters[name]
        padded = pad_flat(part.flatten(), self._count_part(name))
        whole = part.new_empty(self._ranks.world_size * len(padded))
        self._ranks.all_gather(whole, padded.contiguous())
        return whole[: parameter.numel()].view_as(parameter).cpu() if self._ranks.is_first else torch.empty(0)


def build_optimizer(
    model: nn.Module, settings: TrainerSection, ranks: Ranks, *, has_sharded_gradients: bool | None = None
) -> MasterAdamW:
    if ranks.is_alone:
        return MasterAdamW(model, settings)
    return ShardedAdamW(model, settings, ranks, has_sharded_gradients=has_sharded_gradients)
