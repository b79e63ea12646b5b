"""AdamW over the parameters that the sampler reads.

Float32 (or wider) parameters are their own masters. A narrower one has a float32 master and takes its gradient in
float32, so that no sum over backwards is rounded; the update happens in the master, and its rounding is copied back.
Parameters change in place: their memory never moves. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tunesmith.config import TrainerSection
from tunesmith.errors import ModelError

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What torch's AdamW keeps for each parameter."""
DITHERED_AT_ONCE = 2**24
"""Numbers, for the memory of their noise."""
NUM_WATCHED_PARAMETERS, NUM_WATCHED_NUMBERS = 16, 256
"""Matrices, and numbers of each, that show whether an update changes anything."""
LEAST_CHANGE = 1e-9
"""Of a matrix's typical number: less than float32 holds, so only numbers near zero change so little."""


class MasterAdamW:
    """AdamW (Loshchilov and Hutter, 2019) with decoupled weight decay; norms, biases and other vectors are exempt."""

    def __init__(self, model: nn.Module, settings: TrainerSection) -> None:
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trainable:
            raise ModelError("the model has no parameter that takes a gradient")
        self._parameters = trainable
        self._masters = {name: _build_master(p, seed=seed) for seed, (name, p) in enumerate(trainable.items())}
        for name, parameter in trainable.items():
            parameter.grad = None
            parameter.grad_dtype = self._masters[name].dtype
        decayed = [master for master in self._masters.values() if master.ndim >= 2]
        exempt = [master for master in self._masters.values() if master.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": exempt, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            fused=True,
        )

    def clear_gradients(self) -> None:
        """Forget every gradient."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    def compute_grad_norm(self) -> Tensor:
        """Norm over all gradients that have been accumulated; not finite when one of them is not."""
        return torch.nn.utils.get_total_norm([p.grad for p in self._parameters.values() if p.grad is not None])

    @torch.no_grad()
    def update(self, *, learning_rate: float, grad_norm: Tensor, max_grad_norm: float) -> None:
        """Scale the gradients down to `max_grad_norm`, update, write the parameters back, forget the gradients."""
        for name, parameter in self._parameters.items():
            self._masters[name].grad = parameter.grad
        torch.nn.utils.clip_grads_with_norm_(self._masters.values(), max_grad_norm, grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._write_back()
        self.clear_gradients()

    @torch.no_grad()
    def read_watched(self) -> list[Tensor]:
        """Some numbers of some matrices, evenly spread, before they are rounded to the model's type."""
        matrices = [master for master in self._masters.values() if master.ndim >= 2] or list(self._masters.values())
        chosen = matrices[:: -(-len(matrices) // NUM_WATCHED_PARAMETERS)]
        return [each.flatten()[:: -(-each.numel() // NUM_WATCHED_NUMBERS)].double() for each in chosen]

    def compute_changed_ratio(self, before: list[Tensor]) -> Tensor:
        """The part of those numbers that changed by more than rounding can, against the size of their matrix."""
        pairs = zip(before, self.read_watched(), strict=True)
        return (
            torch.cat([(new - old).abs() > LEAST_CHANGE * old.square().mean().sqrt() for old, new in pairs])
            .double()
            .mean()
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, and masters that are not parameters themselves, as `<kind>:<parameter name>`; not copied."""
        state = {}
        for name, master in self._masters.items():
            for kind in MOMENTS:
                if kind in self._adamw.state[master]:
                    state[f"{kind}:{name}"] = self._adamw.state[master][kind]
            if master is not self._parameters[name]:
                state[f"master:{name}"] = master.detach()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave for the same model; parameters with a master are rewritten from it."""
        rest = dict(state)
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(_take(rest, f"master:{name}", master))
            moments = {kind: rest.pop(f"{kind}:{name}") for kind in MOMENTS if f"{kind}:{name}" in rest}
            if moments and any(moments[kind].shape != master.shape for kind in MOMENTS[1:]):
                raise ModelError(f"optimizer state of {name!r} has another shape: it belongs to another model")
            self._adamw.state[master] = {k: value.to(master.device, copy=True) for k, value in moments.items()}
        if rest:
            raise ModelError(f"optimizer state holds {next(iter(rest))!r}, which this model does not have")
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        pairs = [(p, self._masters[name]) for name, p in self._parameters.items() if self._masters[name] is not p]
        if pairs:
            parameters, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(parameters, masters)


def _build_master(parameter: nn.Parameter, *, seed: int) -> Tensor:
    """The parameter itself if it is wide enough, or a float32 tensor that rounds to it."""
    if torch.finfo(parameter.dtype).bits >= 32:
        return parameter
    master = parameter.detach().float().contiguous()
    if parameter.dtype == torch.bfloat16:
        _dither(master, seed=seed)
    return master.requires_grad_()


def _dither(values: Tensor, *, seed: int) -> None:
    """Put each float32 number, which bfloat16 holds, anywhere among those that bfloat16 rounds to it; 0 stays.

    In the middle of that range an update would be rounded away until many of them add up to half a step of bfloat16:
    at a learning rate of 1e-6 and a weight of 0.1 that is 244 updates of one sign. Evenly spread, as many weights cross
    a border at once as an update is of a step, so the rounded weights follow on average from the first update on
    (dither; Schuchman, 1964). A float32 number is a bfloat16 one with 16 more bits, and bfloat16 rounds by them.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    for part in values.view(-1).view(torch.int32).split(DITHERED_AT_ONCE):
        noise = torch.randint(1 - 2**15, 2**15, part.shape, generator=generator, device=part.device, dtype=torch.int32)
        part += noise * (part & 0x7FFFFFFF != 0)


def _take(state: dict[str, Tensor], key: str, like: Tensor) -> Tensor:
    if key not in state or state[key].shape != like.shape:
        raise ModelError(f"optimizer state has no {key!r} of shape {tuple(like.shape)}: it belongs to another model")
    return state.pop(key)
