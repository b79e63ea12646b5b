"""A decoder's forward as a list of calls of its submodules, without the wrappers that transformers puts around it.

transformers merges configs, checks arguments and builds an output object in every forward of a decoder, about 0.2 ms:
a fifth of a decode step of a tiny model. `trace_decoder` records which submodules a forward calls with which values. If
every value is an input, the output of an earlier call or a constant, `DecoderTrace` makes the same calls with the same
results; a decoder that computes anything between those calls has no trace and runs as it is. Submodules are called as
before, with their hooks and replaced forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.model.forward.attention import CausalPlan, run_body

CONSTANT_TYPES = (bool, int, float, str, type(None))
"""Types of arguments that may be the same in every forward."""
NUM_VERIFIED_TOKENS = 3
"""Tokens of the forward that a trace must reproduce; the recorded one has one token, so no size passes as constant."""


class DecoderOutput(NamedTuple):
    """The part of a decoder's output that `run_body` reads."""

    last_hidden_state: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """A call of a submodule in one forward of the decoder."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    keys: tuple[object, ...]
    """`_get_key` of each argument at the time of the call, positional ones first."""
    output_key: object


TracedCall = tuple[nn.Module, Sequence[int], Mapping[str, int]]
"""A submodule and its arguments: indices of inputs, constants and outputs of earlier calls, in that order."""


class DecoderTrace:
    """Takes the place of the decoder in `run_body`."""

    def __init__(self, input_names: Sequence[str], constants: Sequence[Any], calls: Sequence[TracedCall]) -> None:
        self._input_names = tuple(input_names)
        self._constants = tuple(constants)
        self._calls = tuple(calls)

    def __call__(self, **inputs: Any) -> DecoderOutput:
        values = [*map(inputs.__getitem__, self._input_names), *self._constants]
        for module, args, kwargs in self._calls:
            arguments = [values[index] for index in args]
            values.append(module(*arguments, **{name: values[index] for name, index in kwargs.items()}))
        return DecoderOutput(values[-1])


@torch.no_grad()
def trace_decoder(model: PreTrainedModel) -> DecoderTrace | None:
    """Record a forward of one token; None if a trace does not reproduce the decoder's hidden states exactly."""
    decoder, trace = model.get_decoder(), None

    def record(**inputs: Any) -> Any:
        nonlocal trace
        with _recorded_calls(decoder) as calls:
            output = decoder(**inputs)
        trace = _build_trace(inputs, calls, output.last_hidden_state)
        return output

    def run(num_tokens: int, decoder: Callable[..., Any]) -> Tensor:
        positions_1T = torch.arange(num_tokens, device=model.device)[None]
        ids_1T = positions_1T * 7 % len(model.get_input_embeddings().weight)  # not the same object
        return run_body(model, ids_1T, positions_1T, CausalPlan([num_tokens], model.device), decoder=decoder)

    run(1, record)
    if trace is None:
        return None
    return trace if torch.equal(run(NUM_VERIFIED_TOKENS, trace), run(NUM_VERIFIED_TOKENS, decoder)) else None


@contextmanager
def _recorded_calls(decoder: nn.Module) -> Iterator[list[ObservedCall]]:
    """Within, calls of the decoder's children, and of the members of its module lists, are appended to the list."""
    calls: list[ObservedCall] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        keys = tuple(map(_get_key, (*args, *kwargs.values())))
        calls.append(
            ObservedCall(module=module, args=args, kwargs=kwargs, output=output, keys=keys, output_key=_get_key(output))
        )

    children = [child for each in decoder.children() for child in (each if isinstance(each, nn.ModuleList) else [each])]
    handles = [child.register_forward_hook(record, with_kwargs=True) for child in children]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _get_key(value: Any) -> object:
    """Identifies a value by the object, and a tensor also by how often it was changed in place."""
    return id(value), value._version if isinstance(value, Tensor) else 0


def _build_trace(inputs: Mapping[str, Any], calls: Sequence[ObservedCall], hidden: Tensor) -> DecoderTrace | None:
    """The calls with their arguments as indices; None if the decoder computed one of the values itself."""
    arguments = [value for call in calls for value in (*call.args, *call.kwargs.values())]
    constants = {_get_key(value): value for value in arguments if isinstance(value, CONSTANT_TYPES)}
    index_of = {_get_key(value): index for index, value in enumerate(inputs.values())}
    index_of |= {key: len(inputs) + index for index, key in enumerate(constants)}
    traced: list[TracedCall] = []
    for number, call in enumerate(calls):
        if not all(key in index_of for key in call.keys):
            return None
        indices = [index_of[key] for key in call.keys]
        args, kwargs = indices[: len(call.args)], zip(call.kwargs, indices[len(call.args) :], strict=True)
        traced.append((call.module, args, dict(kwargs)))
        index_of[call.output_key] = len(inputs) + len(constants) + number
    has_same_output = bool(calls) and _get_key(hidden) == calls[-1].output_key
    return DecoderTrace(tuple(inputs), tuple(constants.values()), traced) if has_same_output else None
