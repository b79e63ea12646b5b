"""Logits from hidden states, without the model's own forward.

`run_body` returns hidden states of every token; logits are computed here only for the positions that need them. The
scaling and softcap that an architecture applies after its head come from its config. `verify_model` compares the result
with the model's own logits once, and refuses an architecture where they differ. On a GPU the product of 16-bit hidden
states and weights is float32: rounding logits to bfloat16 changes logprobs more than all attention kernels together.

Axes: N positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from tunesmith.errors import ModelError
from tunesmith.model.device_errors import is_device_error
from tunesmith.model.forward.attention import (
    AttentionOptions,
    AttentionPlan,
    CausalPlan,
    check_layers,
    get_layer_index,
    refuse_architecture,
    run_body,
)
from tunesmith.model.forward.recurrence import RECURRENT_TYPES, STATELESS_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScaling:
    """What an architecture does to the output of its head, in this order; None or 0: nothing."""

    factors: tuple[float | None, ...]
    divisor: float | None
    softcap: float | None

    @classmethod
    def read(cls, model: PreTrainedModel) -> LogitScaling:
        """From the config; a decode loop reads it once, because every access of a config takes microseconds."""
        config = model.config.get_text_config()
        return cls(
            factors=(getattr(config, "logit_scale", None), getattr(config, "lm_head_multiplier", None)),
            divisor=getattr(config, "logits_scaling", None),
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def apply(self, logits_NV: Tensor) -> Tensor:
        for factor in self.factors:
            if factor:
                logits_NV = logits_NV * factor
        if self.divisor:
            logits_NV = logits_NV / self.divisor
        if self.softcap:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV


def compute_logits(model: PreTrainedModel, hidden_NC: Tensor, *, scaling: LogitScaling | None = None) -> Tensor:
    """Logits [N, V] with the architecture's scaling and softcap; float32 for a plain 16-bit head on a GPU.

    `scaling` is that of the model, if it has been read already.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language-model head; load it as a causal language model")
    is_16bit = is_16bit_linear_head(head, hidden_NC)
    logits_NV = _Float32Matmul.apply(hidden_NC, head.weight) if is_16bit else head(hidden_NC)
    return (scaling or LogitScaling.read(model)).apply(logits_NV)


def is_16bit_linear_head(head: nn.Module, hidden_NC: Tensor) -> bool:
    """Whether the head is a plain 16-bit `nn.Linear` on a GPU: no bias, adapter or quantized weight."""
    if not (hidden_NC.is_cuda and hidden_NC.dtype in (torch.bfloat16, torch.float16)):
        return False
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return False
    return head.weight.dtype == hidden_NC.dtype


def get_logit_scaling(model: PreTrainedModel) -> tuple[float, float]:
    """The factor that `compute_logits` applies to the head's output, and the softcap that follows (0: none)."""
    scaling = LogitScaling.read(model)
    scale = math.prod(factor or 1.0 for factor in scaling.factors)
    return scale / (scaling.divisor or 1.0), scaling.softcap or 0.0


class _Float32Matmul(torch.autograd.Function):
    """hidden @ weight.T of 16-bit tensors with a float32 result."""

    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NC, weight_VC)
        return torch.mm(hidden_NC, weight_VC.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_NC, weight_VC = ctx.saved_tensors
        grad_NV = grad_NV.to(hidden_NC.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return grad_NV @ weight_VC if needs_hidden else None, grad_NV.t() @ hidden_NC if needs_weight else None


class RecordingPlan(CausalPlan):
    """Records which layers attended, their sizes and sliding windows; refuses a layer that attends twice."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.window_of_layer: dict[int, int | None] = {}
        self.heads_of_layer: dict[int, tuple[int, int]] = {}
        """Number of key-value heads, and their size."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer = get_layer_index(module)
        if layer in self.window_of_layer:
            raise ModelError(
                f"{type(module).__name__}: layer {layer} attends more than once in a forward, and the KV cache holds "
                "one key and value per token and layer: not supported"
            )
        self.window_of_layer[layer] = options.sliding_window
        self.heads_of_layer[layer] = (key.shape[1], key.shape[3])
        return super().attend(module, query, key, value, options)


@torch.no_grad()
def verify_model(model: PreTrainedModel) -> None:
    """Raise ModelError unless plan attention and `compute_logits` reproduce the model's logits on two short rows, and
    the second row does not depend on the first."""
    config = model.config.get_text_config()
    check_layers(config)
    ids = torch.arange(1, 8, device=model.device) * 7 % config.vocab_size
    rows = [ids[:3], ids[3:]]
    positions = torch.cat([torch.arange(len(row), device=model.device) for row in rows])
    plan = RecordingPlan([len(row) for row in rows], model.device)
    is_training = model.training
    model.eval()
    ours = _run_planned(model, ids[None], positions[None], plan).float()
    theirs = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows]).float()
    leak, noise = _measure_leak(model, rows, positions, ours)
    model.train(is_training)
    _check_attending(model, plan.window_of_layer)
    if not theirs.isfinite().all():
        raise ModelError(explain_not_finite(model))
    is_wide = torch.finfo(model.dtype).bits >= 32
    error, tolerance = _compare(ours, theirs), 1e-3 if is_wide else 5e-2
    if not error < tolerance:
        raise refuse_architecture(
            config,
            f"logits computed from hidden states differ from the model's own by {error:.1e} (at most {tolerance:.0e})",
        )
    if not leak < max(1e-5 if is_wide else 1e-3, 10 * noise):
        raise refuse_architecture(
            config,
            f"the tokens of a packed sequence change the logits of the next one by {leak:.1e}, so some layers keep a "
            "state across sequences",
        )


def _measure_leak(
    model: PreTrainedModel, rows: Sequence[Tensor], positions: Tensor, ours: Tensor
) -> tuple[float, float]:
    """How much the logits of the second sequence change with the tokens of the first, and those of the first with the
    second.

    At initial weights a state that one sequence leaves to the next changes logits by less than the tolerance against
    the model's own, but without such a state the second sequence is computed from the same numbers. A later sequence
    cannot change an earlier one, so the second result is rounding: products whose shapes depend on the routing of all
    tokens to experts.
    """
    vocab_size, num_first = model.config.get_text_config().vocab_size, len(rows[0])
    plan = CausalPlan([len(row) for row in rows], model.device)
    differences = []
    for changed, kept in ((0, slice(num_first, None)), (1, slice(num_first))):
        others = [(row + (index == changed)) % vocab_size for index, row in enumerate(rows)]
        hidden = run_body(model, torch.cat(others)[None], positions[None], plan)[0]
        differences.append(_compare(compute_logits(model, hidden).float()[kept], ours[kept]))
    return differences[0], differences[1]


def _compare(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the expected."""
    return ((found - expected).norm() / expected.norm().clamp_min(1e-6)).item()


def _run_planned(model: PreTrainedModel, ids_1T: Tensor, positions_1T: Tensor, plan: AttentionPlan) -> Tensor:
    """Logits [T, V] with a plan; a ModelError for modeling code that fails, such as one with attention of its own, an
    encoder, or a head behind more layers."""
    try:
        return compute_logits(model, run_body(model, ids_1T, positions_1T, plan)[0])
    except ModelError:
        raise
    except (RuntimeError, TypeError, AttributeError) as error:
        if is_device_error(error):
            raise
        reason = " ".join(str(error).split())[:200]
        config = model.config.get_text_config()
        raise refuse_architecture(config, f"it does not run with plan attention ({reason})") from error


def explain_not_finite(model: PreTrainedModel) -> str:
    """Error message for a model whose own logits are not finite: bad weights, or overflow in its dtype."""
    broken = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if broken:
        named = ", ".join(broken[:3]) + (" and others" if len(broken) > 3 else "")
        return f"the model's weights are not finite ({named}): its training failed or its files are damaged"
    return f"the model's logits are not finite in {model.dtype}, though its weights are: try model.dtype=float32"


def _check_attending(model: PreTrainedModel, window_of_layer: dict[int, int | None]) -> None:
    """Refuse a model if a layer does not attend through the plan, or a sliding-window layer passes no window.

    Without layer types all layers have the window of the config, if it is shorter than the context.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    is_windowed = window is not None and window < getattr(config, "max_position_embeddings", math.inf)
    every_type = "sliding_attention" if is_windowed else "full_attention"
    layer_types = getattr(config, "layer_types", None) or [every_type] * config.num_hidden_layers
    for layer, layer_type in enumerate(layer_types):
        if layer_type in (*RECURRENT_TYPES, *STATELESS_TYPES):
            continue
        if layer not in window_of_layer:
            raise refuse_architecture(config, f"layer {layer} does not use transformers' attention interface")
        if layer_type == "sliding_attention" and window_of_layer[layer] is None:
            raise ModelError(f"{type(model).__name__}: sliding-window layer {layer} passes no window size")
