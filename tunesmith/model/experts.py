"""Mixtures of experts: one function for sampler and trainer, adapters of experts, and routes of tokens.

`use_experts` selects it in transformers' interface of experts for every architecture that has one. The tokens are
sorted by expert, and one grouped product multiplies them with the weights of all experts, so no step waits for the
host. An adapter adds two grouped products with its low-rank factors; the adapted weights are never built, which for a
large model would take more memory than all activations.

Around a router's own code the engine records the experts of each token (`RouteRecorder`), and the trainer replays them
(`RowRouting`): in 16 bits a token near a boundary would otherwise go to another expert. The gates of replayed experts
are those of the trainer's router, so gradients reach it (R3, Ma et al., 2025).

Axes: T tokens, K experts of a token, P = T x K pairs sorted by expert, E experts, C inputs and O outputs of a product,
L layers with experts, S slots of the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tunesmith.config import TrainerSection
from tunesmith.errors import ModelError
from tunesmith.model.arrays import copy_to_device
from tunesmith.model.custom_op import define_op

EXPERTS = "tunesmith"
ADAPTERS = "expert_adapters"
"""Attribute of a module of experts: its adapters, by the name of the adapted weight."""
ROUTING = "row_routing"
"""Attribute of a model that is trained: its `RowRouting`."""
UNKNOWN = -1
"""In place of an expert: the route of the token was not recorded, and the router chooses."""


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
    """Run the model's experts by `run_experts`, and its routers by `run_router`; others are not changed."""
    if any(find_experts(model)):
        model.set_experts_implementation(EXPERTS)
    for router in find_routers(model):
        if not hasattr(router, "recorded"):
            router.recorded = router.replayed = router.counted = None
            router.__class__ = _wrap_router(router.__class__)


def find_routers(model: nn.Module) -> list[Any]:
    """The routers of the model's experts, one a layer; [] if modeling code of its own has others."""
    routers: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    return routers if len(routers) == len(list(find_experts(model))) else []


@cache
def _wrap_router(kind: Any) -> Any:
    """A router's class with `run_router` as its forward: one function for all layers, which are compiled once."""
    forward = kind.forward
    return type(kind.__name__, (kind,), {"forward": lambda router, *inputs: run_router(forward, router, *inputs)})


def run_router(forward: Any, router: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, E], gates [T, K] and experts [T, K] of the tokens; reversed by Granite in transformers 5.17."""
    with nullcontext() if router.replayed is None else _ReplayedChoice(*router.replayed):
        outputs = forward(router, *inputs)
    order = slice(None, None, 1 if outputs[0].is_floating_point() else -1)
    logits_TE, gate_TK, expert_TK = outputs[order]
    # rows that the trainer scores are recorded too, where nobody reads them
    if router.recorded is not None and not torch.is_grad_enabled() and len(expert_TK) <= len(router.recorded):
        router.recorded[: len(expert_TK)].copy_(expert_TK)
    if router.counted is not None:
        weight_T, slope_E, sums_2E = router.counted
        probability_TE, weight_T1 = logits_TE.softmax(dim=-1, dtype=weight_T.dtype), weight_T[: len(logits_TE), None]
        is_chosen_TE = torch.zeros_like(probability_TE).scatter_(1, expert_TK, 1.0)
        sums_2E.add_((torch.stack([is_chosen_TE, probability_TE.detach()]) * weight_T1).sum(dim=1))
        if slope_E is not None and torch.is_grad_enabled():
            gate_TK = _AddedLoss.apply(gate_TK, (probability_TE * weight_T1 * slope_E).sum().to(gate_TK.dtype))
    return (logits_TE, gate_TK, expert_TK)[order]


class _ReplayedChoice(TorchFunctionMode):
    """Within, a router's choice of the largest scores gives the replayed experts: its own code computes their gates."""

    def __init__(self, expert_TK: Tensor, changed_T: Tensor, num_experts: int) -> None:
        super().__init__()
        self.expert_TK, self.changed_T, self.num_experts = expert_TK, changed_T, num_experts
        self.scores_TE: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # routers with groups of experts choose groups before, and mask the scores of other groups
        is_known = func in (torch.topk, Tensor.topk, Tensor.masked_fill)
        if not is_known or args[0].dim() != 2 or args[0].shape[1] != self.num_experts:
            return output
        scores_TE = args[0] if self.scores_TE is None else self.scores_TE
        if func is Tensor.masked_fill:
            self.scores_TE = scores_TE
            return output
        own_TK, expert_TK = output[1], self.expert_TK[: len(args[0])].long()
        expert_TK = torch.where(expert_TK == UNKNOWN, own_TK, expert_TK)
        is_same_TK = (own_TK[:, :, None] == expert_TK[:, None, :]).any(dim=1)
        self.changed_T[: len(own_TK)].logical_or_(~is_same_TK.all(dim=1))
        return scores_TE.gather(1, expert_TK), expert_TK


class _AddedLoss(torch.autograd.Function):
    """The values; their backward adds a loss to that of the model."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


def run_experts(module: Any, hidden_TC: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """The weighted sum of each token's experts, in the order of its experts."""
    expert_P = expert_TK.reshape(-1)
    order_P, place_P, end_E = sort_pairs(expert_P, module.num_experts)
    place_TK, sorted_P = place_P.view(expert_TK.shape), expert_P[order_P] if module.has_bias else None
    input_PC = _Spread.apply(hidden_TC, order_P // place_TK.shape[1], place_TK)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner_PO = _multiply(module, first, input_PC, end_E, sorted_P)
    inner_PO = module._apply_gate(inner_PO) if module.has_gate else module.act_fn(inner_PO)
    output_PC = _multiply(module, "down_proj", inner_PO, end_E, sorted_P)
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has none
        output_PC = module.post_expert_norm(output_PC)
    summed_TC: Tensor = _Combine.apply(output_PC, weight_TK, order_P, place_TK)
    return summed_TC.to(hidden_TC.dtype)


class _Spread(torch.autograd.Function):
    """A token's row for each of its pairs. Gradients are gathered too: to add to rows by index takes longer, and in an
    order that may change."""

    @staticmethod
    def forward(ctx: Any, hidden_TC: Tensor, token_P: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return hidden_TC[token_P]

    @staticmethod
    def backward(ctx: Any, grad_PC: Tensor) -> tuple[Tensor, None, None]:
        return _sum_pairs(grad_PC, *ctx.saved_tensors).to(grad_PC.dtype), None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of each token's pairs."""

    @staticmethod
    def forward(ctx: Any, row_PC: Tensor, weight_TK: Tensor, order_P: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_PC, weight_TK, order_P, place_TK)
        return _sum_pairs(row_PC, place_TK, weight_TK)

    @staticmethod
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, Tensor, None, None]:
        row_PC, weight_TK, order_P, place_TK = ctx.saved_tensors
        grad_PC = grad_TC[order_P // place_TK.shape[1]] * weight_TK.reshape(-1)[order_P, None]
        grad_TK = (row_PC[place_TK] * grad_TC[:, None]).sum(2)
        return grad_PC.to(row_PC.dtype), grad_TK.to(weight_TK.dtype), None, None


def _sum_pairs(row_PC: Tensor, place_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """In float32 or wider."""
    wide = torch.promote_types(row_PC.dtype, torch.float32)
    if not torch.compiler.is_compiling():
        row_TKC = row_PC[place_TK].to(wide)
        return (row_TKC if weight_TK is None else row_TKC * weight_TK[:, :, None]).sum(1)
    total_TC = row_PC.new_zeros((), dtype=wide)
    for choice, place_T in enumerate(place_TK.unbind(1)):  # one kernel, faster than that of a reduction
        row_TC = row_PC[place_T].to(wide)
        total_TC = total_TC + (row_TC if weight_TK is None else row_TC * weight_TK[:, choice, None])
    return total_TC


def _multiply(module: Any, name: str, input_PC: Tensor, end_E: Tensor, expert_P: Tensor | None) -> Tensor:
    """The product with the weights of each row's expert, with adapter and bias if there are any."""
    weight = getattr(module, name)
    output_PO = _multiply_groups(input_PC, weight if module.is_transposed else weight.transpose(1, 2), end_E)
    adapter = getattr(module, ADAPTERS, {}).get(name)
    if adapter is not None and not adapter.disable_adapters:
        down_ECR, up_ERO, scaling = adapter.read_factors()
        rank_PR = _multiply_groups(input_PC, down_ECR, end_E)
        output_PO = output_PO + _multiply_groups(rank_PR, up_ERO, end_E) * scaling
    return output_PO if expert_P is None else output_PO + getattr(module, f"{name}_bias")[expert_P]


def _multiply_groups(input_PC: Tensor, weight_ECO: Tensor, end_E: Tensor) -> Tensor:
    """Grouped product; in types that torch has none for, transformers' own, which waits for the host."""
    is_traced = torch.compiler.is_compiling() and input_PC.dtype != torch.bfloat16
    if is_traced or input_PC.dtype == torch.float64:
        product: Tensor = torch.ops.transformers.grouped_mm_fallback(input_PC, weight_ECO, end_E)
        return product
    if torch.is_grad_enabled():
        return functional.grouped_mm(input_PC, weight_ECO, offs=end_E)
    return multiply_groups(input_PC, weight_ECO, end_E)


def _run_grouped_mm(input_PC: Tensor, weight_ECO: Tensor, end_E: Tensor) -> Tensor:
    return functional.grouped_mm(input_PC, weight_ECO, offs=end_E)


def _build_products(input_PC: Tensor, weight_ECO: Tensor, _ends: Tensor) -> Tensor:
    return input_PC.new_empty((input_PC.shape[0], weight_ECO.shape[2]))


multiply_groups = define_op(
    "multiply_groups(Tensor inputs, Tensor weights, Tensor ends) -> Tensor", run=_run_grouped_mm, build=_build_products
)
"""(rows [P, C] by expert, weights [E, C, O], where the rows of each expert end [E]) -> products [P, O], without
gradients. On a GPU it has a kernel for few rows (`model.kernels.expert_pairs`, which registers it)."""


def sort_many_pairs(expert_P: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `sort_pairs`."""
    # a radix sort takes a pass for every few bits
    sorted_P, order_P = torch.sort(expert_P.to(torch.int16))
    # a histogram, because a count by index would make the host wait; on a CPU it takes floats only
    value_P = sorted_P.float() if expert_P.device.type == "cpu" else sorted_P.int()
    count_E = torch.histc(value_P, bins=num_experts, min=0, max=num_experts - 1)
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    return order_P, place_P, torch.cumsum(count_E, dim=0, dtype=torch.int32)


def _build_sorted(expert_P: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    index_P = expert_P.new_empty(expert_P.shape, dtype=torch.int64)
    return index_P, torch.empty_like(index_P), expert_P.new_empty((num_experts,), dtype=torch.int32)


sort_pairs = define_op(
    "sort_pairs(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)", run=sort_many_pairs, build=_build_sorted
)
"""(experts [P], number of experts) -> the pairs by expert [P], the place of each pair in this order [P], and where the
pairs of each expert end [E], in int32. On a GPU it has a kernel (`model.kernels.expert_pairs`, which registers it)."""


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, run_experts)


def build_route(model: nn.Module) -> tuple[list[Any], Tensor, int]:
    """The routers, an unknown route [1, L, K] in the smallest type that holds their experts, and how many they have."""
    if not (routers := find_routers(model)):
        raise ModelError(f"trainer.routing_replay: {type(model).__name__} has no routers of transformers: leave it out")
    num_experts, device = next(find_experts(model))[1].num_experts, next(model.parameters()).device
    shape = (1, len(routers), getattr(routers[0], "top_k", None) or routers[0].config.top_k_experts)
    dtype = torch.int8 if num_experts <= 128 else torch.int16
    return routers, torch.full(shape, UNKNOWN, dtype=dtype, device=device), num_experts


class RouteRecorder:
    """The experts of each token in the KV cache, in the slots of its keys and values: requests that share blocks, or
    find them in the prefix cache, read the routes with which these were computed."""

    def __init__(self, model: nn.Module, *, num_slots: int, max_tokens: int) -> None:
        """`max_tokens` of a forward."""
        routers, unknown_1LK, _ = build_route(model)
        self._route_SLK, self._row_TLK = (unknown_1LK.repeat(size, 1, 1) for size in (num_slots, max_tokens))
        self._stream = torch.cuda.Stream(unknown_1LK.device) if unknown_1LK.is_cuda else None
        for layer, router in enumerate(routers):
            router.recorded = self._row_TLK[:, layer]

    def store(self, slot_T: Tensor) -> None:
        """Store the routes of the last forward, whose first tokens are in these slots."""
        self._route_SLK.index_copy_(0, slot_T, self._row_TLK[: len(slot_T)])

    def read(self, slot_T: np.ndarray) -> np.ndarray:
        """Routes [T, L, K] of tokens that have been computed."""
        # on a stream of its own, which does not wait for the burst in the queue: that one writes to other slots
        with torch.cuda.stream(self._stream):
            return np.asarray(self._route_SLK[copy_to_device(slot_T, self._route_SLK.device)].cpu())


class RowRouting:
    """What the trainer asks of routers while it computes a row: replay routes, balance the load, count.

    The balance loss is `load_balancing_loss_func` of the families' modeling code: E times the sum over experts of f,
    the mean number of choices of a token, times P, the mean probability, both over all layers together. Here they are
    means over the sampled tokens of the whole update, on all ranks, so that gradients depend neither on rows nor on
    ranks. The gradient of P needs f, which is therefore counted in a pass before.
    """

    def __init__(self, model: nn.Module, settings: TrainerSection, *, max_tokens: int) -> None:
        self.has_replay, self.balance_coef = settings.routing_replay, settings.router_aux_loss_coef
        self._routers, unknown_1LK, self._num_experts = build_route(model)
        # never replaced: CUDA graphs of rows hold their addresses
        self._route_TLK = unknown_1LK.repeat(max_tokens, 1, 1)
        self._changed_T = torch.zeros_like(self._route_TLK[:, 0, 0], dtype=torch.bool)
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        self._weight_T = torch.zeros_like(self._changed_T, dtype=dtype)
        self._slope_E, self._num_found_2 = self._weight_T.new_zeros(self._num_experts), self._weight_T.new_zeros(2)
        self._balance_loss = self._weight_T.new_zeros(())
        self.sums_L2E = torch.stack([self._slope_E.double().expand(2, -1)] * len(self._routers))
        """Choices and probabilities of the experts."""

    @contextmanager
    def applied(self, num_tokens: int, routes_TLK: np.ndarray | None, weight_T: np.ndarray) -> Iterator[None]:
        """Within, routers compute a row of this many tokens: its first tokens have these routes and weights."""
        assert num_tokens <= len(self._weight_T), f"a row has {num_tokens} tokens, more than {len(self._weight_T)}"
        self._changed_T.zero_()
        for buffer, values in ((self._route_TLK.fill_(UNKNOWN), routes_TLK), (self._weight_T.zero_(), weight_T)):
            if values is not None:
                buffer[: len(values)] = copy_to_device(values, buffer.device)
        for layer, router in enumerate(self._routers):
            router.counted = (self._weight_T, self._slope_E if self.balance_coef else None, self.sums_L2E[layer])
            if self.has_replay:
                router.replayed = (self._route_TLK[:, layer], self._changed_T, self._num_experts)
        try:
            yield
        finally:
            for router in self._routers:
                router.replayed = router.counted = None
        is_found_2T = torch.stack([self._changed_T, self._route_TLK[:, 0, 0] == UNKNOWN])
        self._num_found_2 += (is_found_2T * self._weight_T).sum(dim=1)

    def set_balance(self, sums_L2E: Tensor) -> None:
        """Take these sums, over all rows and ranks, as those of the update."""
        share_E, probability_E = sums_L2E.sum(dim=0)
        num_tokens = (share_E.sum() / self._route_TLK.shape[2]).clamp_min(1)
        self._slope_E.copy_(share_E * (self.balance_coef * self._num_experts / num_tokens**2))
        self._balance_loss.copy_(self._num_experts * torch.dot(share_E, probability_E) / num_tokens**2)

    def take_totals(self) -> dict[str, tuple[Any, Tensor]]:
        """Totals since the last call, with their reductions (docs/guides/metrics.md)."""
        loads_LE = self.sums_L2E[:, 0] / self.sums_L2E[:, 0].mean(dim=1, keepdim=True).clamp_min(1e-9)
        unused = (loads_LE == 0).double().mean()
        totals = {"routing/max_load": ("max", loads_LE.amax()), "routing/unused": ("max", unused)}
        if self.balance_coef:
            totals["routing/balance_loss"] = ("max", self._balance_loss)
        if self.has_replay:
            changed, unrecorded = (("sampled_mean", each) for each in self._num_found_2.clone())
            totals |= {"routing/changed": changed, "routing/unrecorded": unrecorded}
        self.sums_L2E.zero_()
        self._num_found_2.zero_()
        return totals
