"""Mixtures of experts: one function for sampler and trainer, with adapters of experts and counts of routed tokens.

`use_experts` selects it in transformers' interface of experts for every architecture that has one. The tokens are
sorted by expert, and one grouped product multiplies them with the weights of all experts, so no step waits for the
host. An adapter adds two grouped products with its low-rank factors; the adapted weights are never built, which for a
large model would take more memory than all activations.

Axes: T tokens, K experts of a token, P = T x K pairs sorted by expert, E experts, C inputs and O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS = "tunesmith"
ADAPTERS = "expert_adapters"
"""Attribute of a module of experts: its adapters, by the name of the adapted weight."""
COUNTS = "route_counts"
"""Attribute of a module of experts: pairs per expert [E] in passes with gradients, see `start_counting`."""


def find_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of experts that call transformers' interface, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            yield name, module


def find_expert_weights(model: nn.Module) -> list[str]:
    """Names of the weights [E, ..] of all experts."""
    modules = [(name, module.named_parameters(recurse=False)) for name, module in find_experts(model)]
    return [f"{name}.{weight}" for name, weights in modules for weight, each in weights if each.ndim == 3]


def use_experts(model: PreTrainedModel) -> None:
    """Run the model's experts by `run_experts`; a model without such experts is not changed."""
    if any(find_experts(model)):
        model.set_experts_implementation(EXPERTS)


def run_experts(module: Any, hidden_TC: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The weighted sum of each token's experts, in the order of its experts."""
    num_tokens, num_chosen = expert_TK.shape
    expert_P, order_P = torch.sort(expert_TK.reshape(-1))
    # a histogram, because a count by index would make the host wait; on a CPU it takes floats only
    values_P = expert_P.float() if hidden_TC.device.type == "cpu" else expert_P.int()
    count_E = torch.histc(values_P, bins=module.num_experts, min=0, max=module.num_experts - 1)
    if torch.is_grad_enabled() and hasattr(module, COUNTS):
        getattr(module, COUNTS).add_(count_E)
    offset_E = torch.cumsum(count_E, dim=0, dtype=torch.int32)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner_PO = _multiply(module, first, hidden_TC[order_P // num_chosen], offset_E, expert_P)
    inner_PO = module._apply_gate(inner_PO) if module.has_gate else module.act_fn(inner_PO)
    output_PC = _multiply(module, "down_proj", inner_PO, offset_E, expert_P)
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has none
        output_PC = module.post_expert_norm(output_PC)
    output_PC = output_PC * weight_TK.reshape(-1)[order_P, None]
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    return output_PC[place_P].view(num_tokens, num_chosen, -1).sum(dim=1).to(hidden_TC.dtype)


def _multiply(module: Any, name: str, input_PC: Tensor, offset_E: Tensor, expert_P: Tensor) -> Tensor:
    """The product with the weights of each row's expert, with adapter and bias if there are any."""
    weight = getattr(module, name)
    output_PO = _multiply_groups(input_PC, weight if module.is_transposed else weight.transpose(1, 2), offset_E)
    adapter = getattr(module, ADAPTERS, {}).get(name)
    if adapter is not None and not adapter.disable_adapters:
        down_ECR, up_ERO, scaling = adapter.read_factors()
        rank_PR = _multiply_groups(input_PC, down_ECR, offset_E)
        output_PO = output_PO + _multiply_groups(rank_PR, up_ERO, offset_E) * scaling
    return output_PO + getattr(module, f"{name}_bias")[expert_P] if module.has_bias else output_PO


def _multiply_groups(input_PC: Tensor, weight_ECO: Tensor, offset_E: Tensor) -> Tensor:
    """Grouped product; in types that torch has none for, transformers' own, which waits for the host."""
    is_traced = torch.compiler.is_compiling() and input_PC.dtype != torch.bfloat16
    if is_traced or input_PC.dtype == torch.float64:
        product: Tensor = torch.ops.transformers.grouped_mm_fallback(input_PC, weight_ECO, offset_E)
        return product
    return functional.grouped_mm(input_PC, weight_ECO, offs=offset_E)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run_experts)


def start_counting(model: PreTrainedModel) -> None:
    """Count the routed tokens of the passes with gradients that follow, from zero."""
    for _, module in find_experts(model):
        if not hasattr(module, COUNTS):
            # never replaced: CUDA graphs of rows hold its address
            setattr(module, COUNTS, torch.zeros(module.num_experts, device=next(module.parameters()).device))
        getattr(module, COUNTS).zero_()


def summarize_routes(model: PreTrainedModel) -> dict[str, Tensor]:
    """Load of the busiest expert of any layer, as a multiple of an equal load, and the share of experts that no token
    chose; {} without experts."""
    counts = [getattr(module, COUNTS) for _, module in find_experts(model)]
    if not counts:
        return {}
    loads = [count_E / count_E.mean().clamp_min(1) for count_E in counts]
    unused = torch.cat([(count_E == 0).float() for count_E in counts])
    return {"routing/max_load": torch.stack([each.amax() for each in loads]).amax(), "routing/unused": unused.mean()}
