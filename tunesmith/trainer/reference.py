"""The reference of the KL, replaced by the current policy every n steps.

Without an adapter the reference is a model of its own, and a refresh copies the policy's weights into it. With an
adapter it is the policy's frozen base: before the first refresh the base alone, after it the base with a copy of the
adapter. While the reference is scored, that copy is in the adapter's parameters; then the policy's values are put back
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.scores import Need
from tunesmith.errors import ConfigError
from tunesmith.model.adapters.adapter import disabled_adapter, has_adapter
from tunesmith.model.value_model import ValueModel
from tunesmith.trainer.optimizer import find_trainable

Weights = Mapping[str, Tensor]


class Reference:
    """Which policy the reference is, and the weights that a checkpoint needs to restore it."""

    def __init__(self, model: PreTrainedModel, *, refresh_steps: int | None = None) -> None:
        """`model` scores the reference: the policy itself with an adapter, else a model of its own."""
        self.model = model
        self._refresh_steps = refresh_steps
        self._step = 0
        self._adapter: dict[str, Tensor] | None = None
        """Adapter of the reference; None before the first refresh, and without an adapter."""

    @torch.no_grad()
    def advance(self, policy: PreTrainedModel, num_steps: int) -> dict[str, float]:
        """After a step, make the policy the reference if it is due; metrics of the step, empty without refreshes.

        `train/reference_step` is the number of steps made by the policy that was the reference in this step.
        """
        if self._refresh_steps is None:
            return {}
        metrics = {"train/reference_step": float(self._step)}
        if num_steps % self._refresh_steps == 0:
            if has_adapter(self.model):
                self._adapter = {name: tensor.detach().clone() for name, tensor in find_trainable(policy).items()}
            else:
                _copy_weights(policy.state_dict(), self.model.state_dict())
            self._step = num_steps
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Empty before the first refresh; tensors are not copied."""
        if self._step == 0:
            return {}
        weights = self.model.state_dict() if self._adapter is None else self._adapter
        return {"reference": {"step": self._step, "weights": dict(weights)}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a trainer state that holds a `state_dict`; without one the reference stays the starting model."""
        if "reference" not in state:
            return
        self._step = state["reference"]["step"]
        if has_adapter(self.model):
            self._adapter = {name: torch.empty_like(value) for name, value in find_trainable(self.model).items()}
        target = self.model.state_dict() if self._adapter is None else self._adapter
        _copy_weights(state["reference"]["weights"], target)

    @contextmanager
    def installed(self) -> Iterator[PreTrainedModel]:
        """Within, the model computes the reference: with the reference's adapter, or with its own one disabled."""
        if self._adapter is None:
            with disabled_adapter(self.model):
                yield self.model
            return
        parameters = find_trainable(self.model)
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            _copy_weights(self._adapter, parameters)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                _copy_weights(own, parameters)


def _copy_weights(source: Weights, target: Weights) -> None:
    if source.keys() != target.keys():
        name = sorted(source.keys() ^ target.keys())[0]
        raise ConfigError(f"the reference and the policy differ in their weights ({name}): they are different models")
    for name, tensor in target.items():
        tensor.copy_(source[name])


def check_extra_model(algorithm: Algorithm, need: Need, model: PreTrainedModel | ValueModel | None) -> None:
    """Raise a ConfigError unless the model of this role is there if and only if the algorithm needs it."""
    kl_coef = algorithm.kl_coef
    if kl_coef > 0 and algorithm.is_supervised:
        raise ConfigError(f"kl_coef={kl_coef} needs sampled tokens, which {algorithm.name!r} has none of: set it to 0")
    if (need in algorithm.needs) != (model is not None):
        role = "critic" if need == "values" else need
        passed = f"no {role} model was passed" if model is None else f"a {role} model was passed"
        reason = f"kl_coef={kl_coef}" if need == "reference" else f"algorithm_type={algorithm.name!r}"
        raise ConfigError(f"{reason}, but {passed}")


def check_dropouts(dropouts: Sequence[nn.Dropout], algorithm: Algorithm) -> None:
    """Raise a ConfigError if the adapter has dropout and the algorithm compares the policy with another pass."""
    if dropouts and (not algorithm.is_supervised or "logprobs" in algorithm.needs):
        raise ConfigError(
            f"model.lora.dropout={dropouts[0].p:g} is for supervised fine-tuning only: {algorithm.name!r} compares "
            "logprobs of different forward passes; set it to 0"
        )
