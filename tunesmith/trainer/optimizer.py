"""AdamW with float32 master weights, over the parameters that the sampler reads.

A parameter of 32 bits or more is its own master. A narrower one has a float32 master and a float32 gradient, so
gradient accumulation is not rounded; AdamW updates the master, which is then rounded into the parameter. Parameters
change in place and keep their memory. Nothing here synchronizes with the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tunesmith.config import TrainerSection
from tunesmith.errors import ModelError

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""State that torch's AdamW keeps for each parameter."""
DITHER_CHUNK_SIZE = 2**24
"""Elements that are dithered at once; bounds the memory of the noise."""
CHECKSUM_CHUNK_SIZE = 2**20
"""Elements of which a checksum is computed at once."""
NUM_SAMPLED_MATRICES, NUM_SAMPLED_ELEMENTS = 16, 256
"""Number of matrices, and of elements of each, that are compared before and after an update."""
MIN_RELATIVE_CHANGE = 1e-9
"""Relative to the RMS of the matrix; below float32 precision, so only elements near zero change by less."""


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, 2019) with decoupled weight decay; norms, biases and other vectors are exempt."""

    stream: Any = None
    """`StreamedGradients` on several ranks, if gradients are summed over ranks row by row; else None."""

    def __init__(self, model: nn.Module, settings: TrainerSection) -> None:
        self._parameters = trainable = find_trainable(model)
        self._masters = {name: build_master(p, seed=seed) for seed, (name, p) in enumerate(trainable.items())}
        for name, parameter in trainable.items():
            parameter.grad = None
            parameter.grad_dtype = self._masters[name].dtype
        self._adamw = build_adamw(settings, self._parameters, self._masters)

    def clear_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    def compute_grad_norm(self) -> Tensor:
        """Norm of all accumulated gradients; not finite if an element is not."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])

    @torch.no_grad()
    def update(self, *, learning_rate: float, grad_norm: Tensor, max_grad_norm: float) -> None:
        """Clip gradients to `max_grad_norm`, update the masters, write them to the parameters, clear gradients."""
        masters = list(self._masters.values())
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:  # else the master has it already, or there is none
                self._masters[name].grad = parameter.grad
        torch.nn.utils.clip_grads_with_norm_(masters, max_grad_norm, grad_norm.to(masters[0].dtype))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._write_back()
        self.clear_gradients()

    @torch.no_grad()
    def sample_weights(self) -> list[Tensor]:
        """Evenly spaced elements of some master matrices, as float64."""
        matrices = [master for master in self._masters.values() if master.ndim >= 2] or list(self._masters.values())
        chosen = matrices[:: -(-len(matrices) // NUM_SAMPLED_MATRICES)]
        strided = [each.flatten()[:: -(-each.numel() // NUM_SAMPLED_ELEMENTS)] for each in chosen]
        return [each.to(torch.float64, copy=True) for each in strided]

    def measure_change(self, before: list[Tensor]) -> dict[str, Tensor]:
        """Metrics of the elements of `sample_weights`: the share that changed by more than `MIN_RELATIVE_CHANGE`, and
        the RMS of the change relative to the RMS of the values before."""
        after = self.sample_weights()
        pairs = zip(before, after, strict=True)
        changed = [(new - old).abs() > MIN_RELATIVE_CHANGE * old.square().mean().sqrt() for old, new in pairs]
        old, new = torch.cat(before), torch.cat(after)
        size = old.square().mean().sqrt().clamp_min(torch.finfo(old.dtype).tiny)
        return {
            "train/changed_ratio": torch.cat(changed).double().mean(),
            "train/relative_update": (new - old).square().mean().sqrt() / size,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Moments and separate masters as `<kind>:<parameter name>`; tensors are not copied."""
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            moments = self._adamw.state[master]
            state |= {f"{kind}:{name}": self._gather(name, moments[kind]) for kind in MOMENTS if kind in moments}
            if self._has_master(name):
                state[f"master:{name}"] = self._gather(name, master.detach())
        return state

    def take_times(self) -> dict[str, float]:
        """Metrics of time spent on other ranks; none on a single one."""
        return {}

    def count_state_bytes(self) -> int:
        """Size of `state_dict` after the first update."""
        return sum(
            parameter.numel() * self._masters[name].itemsize * (3 if self._has_master(name) else 2)
            for name, parameter in self._parameters.items()
        )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a `state_dict` of the same model, of any number of ranks; parameters with a separate master are
        rewritten from it."""
        rest = dict(state)
        for name, master in self._masters.items():
            self._restore_master(name, rest)
            moments = {kind: rest.pop(f"{kind}:{name}") for kind in MOMENTS if f"{kind}:{name}" in rest}
            if moments and any(moments[kind].shape != self._parameters[name].shape for kind in MOMENTS[1:]):
                raise ModelError(f"optimizer state of {name!r} has another shape: it belongs to another model")
            self._adamw.state[master] = {
                kind: (value if kind == "step" else self._cut(name, value)).to(master.device, copy=True)
                for kind, value in moments.items()
            }
        if rest:
            raise ModelError(f"optimizer state holds {next(iter(rest))!r}, which this model does not have")
        self._write_back()

    def _gather(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor of which the master, or a moment, is a part: itself."""
        return part

    def _restore_master(self, name: str, state: dict[str, Tensor]) -> None:
        """Set a separate master from the state, which loses it."""
        master = self._masters[name]
        if master is not self._parameters[name]:
            master.copy_(pop_tensor(state, f"master:{name}", master))

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """The part of a tensor of the parameter's shape that belongs to the master: all of it."""
        return whole

    def _has_master(self, name: str) -> bool:
        """Whether a state has a master of the parameter, because the model computes with fewer bits."""
        return not is_wide(self._parameters[name])

    @torch.no_grad()
    def _write_back(self) -> None:
        pairs = [(p, self._masters[name]) for name, p in self._parameters.items() if self._masters[name] is not p]
        if pairs:
            parameters, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(parameters, masters)


def compute_learning_rate(settings: TrainerSection, *, step: int, num_total_steps: int) -> float:
    """Learning rate of step 0, 1, ...

    Linear warm-up from 0 (exclusive) to the peak at the first step after the warm-up. The cosine schedule then decays
    to `min_lr_ratio` times the peak at step `num_total_steps`, one after the last.
    """
    # The product is rounded before it is rounded up: 0.07 of 100 steps are 7, not 8.
    num_warmup_steps = settings.warmup_steps or math.ceil(round(settings.warmup_ratio * num_total_steps, 6))
    if step < num_warmup_steps:
        return settings.peak_learning_rate * (step + 1) / (num_warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.peak_learning_rate
    progress = min((step - num_warmup_steps) / max(num_total_steps - num_warmup_steps, 1), 1.0)
    share = settings.min_lr_ratio + (1 - settings.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return settings.peak_learning_rate * share


@torch.no_grad()
def compute_checksum(tensors: Iterable[Tensor]) -> int:
    """A checksum of all elements, each rounded to a multiple of about 1e-7, computed on their devices.

    A weight of exactly 0 that becomes 1e-30 has not changed. Of many weights that change by less than 1e-7 some cross
    from one multiple to the next. Each is multiplied by a pseudo-random number of its position, so that changes of
    several weights do not cancel.
    """
    checksum = 0
    for tensor in tensors:
        factors = torch.arange(min(tensor.numel(), CHECKSUM_CHUNK_SIZE), device=tensor.device) * 0x9E3779B1 + 1
        factors = ((factors ^ (factors >> 15)) * 0x2C1B3C6D).int() | 1
        for part in tensor.detach().flatten().split(CHECKSUM_CHUNK_SIZE):
            bits = (part.float() + 1).view(torch.int32)
            checksum = (checksum * 0x100000001B3 + int((bits * factors[: len(part)]).sum())) % 2**64
    return checksum


def find_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take a gradient, by name."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ModelError("the model has no parameter that takes a gradient")
    return trainable


def build_adamw(
    settings: TrainerSection, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]
) -> torch.optim.AdamW:
    """AdamW on the masters, or on a rank's parts of them, by name of the parameter."""
    decayed = [masters[name] for name, parameter in parameters.items() if parameter.ndim >= 2]
    exempt = [masters[name] for name, parameter in parameters.items() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.peak_learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )


def is_wide(parameter: nn.Parameter) -> bool:
    """Whether the parameter has 32 bits or more and so needs no separate master."""
    return torch.finfo(parameter.dtype).bits >= 32


def build_master(parameter: nn.Parameter, *, seed: int) -> Tensor:
    """The parameter itself if it has 32 bits or more, else a float32 tensor that rounds to it."""
    if is_wide(parameter):
        return parameter
    master = parameter.detach().float().contiguous()
    if parameter.dtype == torch.bfloat16:
        _dither(master, seed=seed)
    return master.requires_grad_()


def _dither(values: Tensor, *, seed: int) -> None:
    """Add uniform noise below half a bfloat16 step, so that each value still rounds to the same bfloat16; 0 stays 0.

    A master exactly at its bfloat16 weight absorbs updates until they add up to half a step of bfloat16: at a learning
    rate of 1e-6 and a weight of 0.1 that is 244 updates of one sign. With uniform noise, an update of a fraction of a
    step moves that fraction of the weights at once, so the rounded weights follow the masters on average from the first
    update on (dither; Schuchman, 1964). float32 has 16 bits more than bfloat16; the noise is added to these bits.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    for part in values.view(-1).view(torch.int32).split(DITHER_CHUNK_SIZE):
        noise = torch.randint(1 - 2**15, 2**15, part.shape, generator=generator, device=part.device, dtype=torch.int32)
        part += noise * (part & 0x7FFFFFFF != 0)


def pop_tensor(state: dict[str, Tensor], key: str, like: Tensor) -> Tensor:
    if key not in state or state[key].shape != like.shape:
        raise ModelError(f"optimizer state has no {key!r} of shape {tuple(like.shape)}: it belongs to another model")
    return state.pop(key)
