"""Plan attention: one attention function for every architecture; a plan defines which tokens attend to which.

`use_plan_attention` selects the implementation named "tunesmith" in transformers' attention and mask interfaces, and
`run_body` passes a plan through the unchanged modeling code to every layer. The engine's plan reads a paged KV cache,
the trainer's plan a tree of sequences. Without a plan the model behaves as with `sdpa`. `check_architecture` refuses
what sampler and trainer would not compute correctly before weights are read; `verify_model` measures the rest on the
loaded model.

Rotary frequencies do not depend on what else is in a batch. Models with LongRoPE (Phi-3 and Phi-4 with long contexts)
have two sets of frequencies. transformers chooses one set for a whole forward, by its largest position: a short
sequence would be computed differently beside a long one, and keys in a KV cache differently from the queries that
follow. As in vLLM, the set is chosen once, by the longest context.

Axes: T tokens of the row, C hidden size, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tunesmith.errors import ModelError
from tunesmith.model.experts import use_experts
from tunesmith.model.forward.recurrence import (
    HYBRID,
    RECURRENT_MODELS,
    RECURRENT_TYPES,
    STATELESS_TYPES,
    SegmentTable,
    list_sequences,
    use_recurrent_plans,
)
from tunesmith.model.towers import find_model_class, name_text_parts

LAYER_TYPES = ("full_attention", "sliding_attention")
UNIFORM = ("sliding_window", "num_attention_heads", "hidden_size")
"""What KV cache and attention plans take from the configuration for all layers at once."""
SUPPORTED = (
    "supported are text models of transformers in which every layer is of type full_attention or sliding_attention "
    "and all have as many query heads, such as Llama, Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, Mistral, Gemma 3 and "
    f"Phi-3, and those with recurrent layers of types {', '.join(RECURRENT_MODELS)}"
)


def refuse_architecture(config: PretrainedConfig, reason: str) -> ModelError:
    """The error for a model of a type that cannot be sampled or trained."""
    text = config.get_text_config()
    types = ", ".join(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    layers = f" with layers of type {types}" if types else ""
    return ModelError(f"models of type {text.model_type!r}{layers} are not supported: {reason}; {SUPPORTED}")


def check_layers(config: PretrainedConfig) -> None:
    """Refuse layers that do not attend, or that have windows or numbers of query heads of different sizes."""
    text = config.get_text_config()
    known = {*LAYER_TYPES}
    if text.model_type in RECURRENT_MODELS:
        known |= {*RECURRENT_TYPES, *STATELESS_TYPES, HYBRID}
    if unknown := set(getattr(text, "layer_types", None) or ()) - known:
        raise refuse_architecture(text, f"layers of type {', '.join(sorted(unknown))} are not implemented")
    if getattr(text, "is_heterogeneous", False):
        varying = [name for name in UNIFORM if len({getattr(each, name, None) for each in text.per_layer_config}) > 1]
        if varying:
            raise refuse_architecture(text, f"its layers differ in {', '.join(varying)}")


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse a configuration whose layers or modeling code plan attention does not support."""
    check_layers(config)
    model_class = find_model_class(config)
    if model_class is not None:
        check_attention_interface(config, model_class)
    elif not getattr(config, "auto_map", None):  # code of the model's own is checked once it is loaded
        raise refuse_architecture(config, "transformers has no causal language model for it")


def check_attention_interface(config: PretrainedConfig, model_class: Any) -> None:
    """Refuse modeling code that does not use transformers' attention interface."""
    # models with recurrent layers do not say that they do; `verify_model` measures whether their attention uses plans
    is_known = config.get_text_config().model_type in RECURRENT_MODELS
    if not (is_known or model_class._supports_attention_backend):
        raise refuse_architecture(config, f"{model_class.__name__} does not use transformers' attention interface")


PLAN_ATTENTION = "tunesmith"
UNSUPPORTED_INPUTS = ("position_bias", "cache")
"""Attention inputs of a few architectures that plans do not implement; ignoring them would be silently wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How one layer computes attention scores."""

    scaling: float | None = None
    """Factor of the dot products; None: 1 / sqrt(head size)."""
    sliding_window: int | None = None
    """A token attends to itself and at most `sliding_window - 1` tokens before it; None: to all of them."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`; None: no cap."""
    sinks: Tensor | None = None
    """Score [H] of one more key in each softmax, which has no value; it is neither scaled nor capped."""

    def get_scaling(self, head_size: int) -> float:
        return head_size**-0.5 if self.scaling is None else self.scaling


class AttentionPlan(Protocol):
    """Attention among the tokens of one flat row, for every layer; recurrent layers read the segments of its paths."""

    @property
    def segments(self) -> SegmentTable: ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Take query [1, H, T, D], key and value [1, K, T, D]; return [1, T, H, D], contiguous.

        `get_layer_index(module)` is the layer.
        """
        ...


def use_plan_attention(model: PreTrainedModel) -> None:
    """Make attention and recurrent layers use plans, and experts `run_experts`.

    Calls without a plan still behave as with `sdpa`.
    """
    parts = name_text_parts(model.config, PLAN_ATTENTION)
    model.set_attn_implementation(parts)
    use_recurrent_plans(model)
    use_experts(model)
    if model.device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan per shape: 0.9 ms a layer for each new length
    others = {id(getattr(model.config, key, None)) for key in model.config.sub_configs if key not in parts}
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or id(module.config) in others:
            continue
        if module.config._attn_implementation != PLAN_ATTENTION:
            raise refuse_architecture(
                module.config, f"{type(module).__name__} does not use transformers' attention interface"
            )


def check_plan_attention(*models: PreTrainedModel) -> None:
    for each in models:
        if each.config._attn_implementation != PLAN_ATTENTION:
            raise ModelError(f"{type(each).__name__} was not prepared with use_plan_attention")


def run_body(
    model: PreTrainedModel,
    input_ids_1T: Tensor,
    position_ids_1T: Tensor,
    plan: AttentionPlan,
    *,
    decoder: Callable[..., Any] | None = None,
) -> Tensor:
    """Hidden states [1, T, C] after the final norm; the caller applies the head to the positions it needs.

    `decoder` replaces the model's own decoder, for instance by a compiled one.
    """
    decoder = model.get_decoder() if decoder is None else decoder
    outputs = decoder(
        input_ids=input_ids_1T,
        position_ids=position_ids_1T,
        attention_mask=input_ids_1T.new_empty((1, 1, 1, 1)),  # four axes: transformers then builds no mask
        use_cache=False,
        attention_plan=plan,
    )
    return outputs.last_hidden_state


def get_layer_index(module: nn.Module) -> int:
    """Index of an attention module's layer, from 0."""
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def compute_weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis, in float32 or wider; `sinks` [.., 1] broadcast against the rows of the scores."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(dim=-1, dtype=dtype)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1, dtype=dtype)[..., :-1]


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Attention under a boolean mask (True: attends; None: no mask), any leading axes, grouped queries.

    Takes query [.., H, Q, D], key and value [.., K, S, D]; returns [.., H, Q, D]. The query heads of a group may also
    stand on the axis Q, with H = K.
    """
    softcap, sinks = options.softcap, options.sinks
    if softcap is None and sinks is None:
        has_groups = query.shape[-3] != key.shape[-3]
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=options.scaling, enable_gqa=has_groups
        )
    num_groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(num_groups, dim=-3), value.repeat_interleave(num_groups, dim=-3)
    scaling = options.get_scaling(query.shape[-1])
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    sinks = None if sinks is None else sinks.view(query.shape[-3], -1, 1)
    return compute_weights(scores, sinks).to(value.dtype) @ value


class CausalPlan:
    """Independent causal sequences concatenated in one row: the reference that other plans are tested against."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
        distance = torch.arange(len(sequence), device=device)
        self.distance_TT = distance[:, None] - distance[None, :]
        self.mask_TT = (sequence[:, None] == sequence[None, :]) & (self.distance_TT >= 0)
        self.segments = SegmentTable(list_sequences(lengths), device)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        mask_TT = self.mask_TT
        if options.sliding_window is not None:
            mask_TT = mask_TT & (self.distance_TT < options.sliding_window)
        output = attend_masked(query, key, value, mask_TT, options)
        return output.transpose(1, 2).contiguous()


def _run_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer; returns [B, T, H, D]."""
    options = AttentionOptions(scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    if attention_plan is not None:
        _check_supported(module, attention_mask, dropout, kwargs)
        return _attend_padded(attention_plan, module, query, key, value, options), None
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is None and query.shape[2] > 1:  # `sdpa_mask` returns None for a causal mask
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    output = attend_masked(query, key, value, attention_mask, options)
    return output.transpose(1, 2).contiguous(), None


def _attend_padded(
    plan: AttentionPlan, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Plans and KV caches have one size for keys and values; where they differ (latent attention), zeros are appended
    to the smaller, which change no score and no sum."""
    size, value_size = query.shape[-1], value.shape[-1]
    if size == value_size:
        return plan.attend(module, query, key, value, options)
    options = replace(options, scaling=options.get_scaling(size))
    query, key, value = (
        functional.pad(each, (0, max(size, value_size) - each.shape[-1])) for each in (query, key, value)
    )
    return plan.attend(module, query, key, value, options)[..., :value_size].contiguous()


def _check_supported(module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None and attention_mask.numel() != 1:  # not the placeholder of `run_body`
        raise ModelError(f"{type(module).__name__} computes its own attention mask, which plans do not apply")
    unknown = [name for name in UNSUPPORTED_INPUTS if kwargs.get(name) is not None]
    if unknown:
        raise ModelError(f"{type(module).__name__} uses attention inputs that are not supported: {', '.join(unknown)}")
    if dropout:
        raise ModelError(f"{type(module).__name__} has attention dropout {dropout}; set attention_dropout to 0")


ALL_ATTENTION_FUNCTIONS.register(PLAN_ATTENTION, _run_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PLAN_ATTENTION, sdpa_mask)


FIXED = "fixed"
"""Value of `rope_type` that no update of transformers applies to."""


@torch.no_grad()
def fix_rotary_frequencies(*models: nn.Module | None, max_model_len: int) -> None:
    """Keep the frequencies of a sequence of `max_model_len` tokens for sequences of every length; idempotent."""
    for module in [module for model in models if model is not None for module in model.modules()]:
        rope_type = getattr(module, "rope_type", None)
        of_layer_type = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        changing = [name for name, value in of_layer_type.items() if depends_on_length(value)]
        if not changing:
            continue
        last = torch.full((1, 1), max_model_len - 1, device=next(module.buffers()).device)
        for layer_type in changing:
            module(last.float(), last, **({} if layer_type is None else {"layer_type": layer_type}))
        fixed = {name: FIXED if name in changing else value for name, value in of_layer_type.items()}
        module.rope_type = fixed if isinstance(rope_type, dict) else FIXED  # type: ignore[assignment]


def depends_on_length(rope_type: object) -> bool:
    """Whether transformers chooses the frequencies by the largest position of a forward."""
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)
