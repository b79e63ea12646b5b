"""What a traced recurrent layer calls as one operation: torch neither unrolls the turns of a row nor copies the states.

The operations of decode steps have kernels for CUDA only (`model.kernels.recurrent_steps`, which registers them, and a
kernel of `invert_unit_lower`).

Axes: those of `recurrence`; S states, E ends, U turns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunesmith.model.custom_op import define_op


def _scan_chunks(
    initial_SHKV: Tensor, new_NHLV: Tensor, old_NHLK: Tensor | None, growth_NH11: Tensor, keys_NHKL: Tensor,
    turns_U2: Tensor, parents_N: Tensor, ends_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_heads, sizes = new_NHLV.shape[1], initial_SHKV.shape[1:]
    states_NHKV, ended_EHKV = (
        initial_SHKV.new_empty((len(new_NHLV), *sizes)),
        initial_SHKV.new_empty((len(ends_E), *sizes)),
    )
    # one axis for chunks and heads, as products of batches need it
    growth, keys, new, states = (each.flatten(0, 1) for each in (growth_NH11, keys_NHKL, new_NHLV, states_NHKV))
    old = None if old_NHLK is None else old_NHLK.flatten(0, 1)
    deltas = new if old is None else new.new_empty(new.shape)
    after_MHKV, first, first_end = initial_SHKV, 0, 0
    for num_chunks, num_ends in turns_U2.tolist():
        if not num_chunks:
            break
        last, last_end = first + num_chunks, first_end + num_ends
        here = slice(first * num_heads, last * num_heads)
        torch.index_select(after_MHKV, 0, parents_N[first:last], out=states_NHKV[first:last])
        if old is not None:
            torch.baddbmm(new[here], old[here], states[here], alpha=-1, out=deltas[here])
        after = (growth[here] * states[here]).baddbmm_(keys[here], deltas[here])
        after_MHKV = after.view(num_chunks, *sizes)
        if num_ends:
            torch.index_select(after_MHKV, 0, ends_E[first_end:last_end], out=ended_EHKV[first_end:last_end])
        first, first_end = last, last_end
    return states_NHKV, new.new_empty(0) if old is None else deltas.view(new_NHLV.shape), ended_EHKV


def _build_scanned(
    initial_SHKV: Tensor, new_NHLV: Tensor, old_NHLK: Tensor | None, _growth: Tensor, _keys: Tensor, _turns: Tensor,
    _parents: Tensor, ends_E: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = initial_SHKV.shape[1:]
    return (
        initial_SHKV.new_empty((new_NHLV.shape[0], *sizes)),
        new_NHLV.new_empty((0,) if old_NHLK is None else new_NHLV.shape),
        initial_SHKV.new_empty((ends_E.shape[0], *sizes)),
    )


def _scan_chunks_backward(
    grad_states_NHKV: Tensor, grad_deltas_NHLV: Tensor, old_NHLK: Tensor | None, growth_NH11: Tensor,
    keys_NHKL: Tensor, states_NHKV: Tensor, deltas_NHLV: Tensor, turns_U2: Tensor, parents_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    num_heads, sizes = states_NHKV.shape[1], states_NHKV.shape[1:]
    growth, keys, states, deltas, grad_states = (
        each.flatten(0, 1) for each in (growth_NH11, keys_NHKL, states_NHKV, deltas_NHLV, grad_states_NHKV)
    )
    after_NHKV = torch.zeros(states_NHKV.shape, dtype=states.dtype, device=states.device)
    after = after_NHKV.flatten(0, 1)  # gradients of the states after each chunk
    if old_NHLK is None:
        old, new = None, torch.zeros(deltas.shape, dtype=deltas.dtype, device=deltas.device)
    else:
        old, new = old_NHLK.flatten(0, 1), grad_deltas_NHLV.flatten(0, 1).clone(memory_format=torch.contiguous_format)
    counts, last = turns_U2[:, 0].tolist(), len(states_NHKV)
    for turn in reversed(range(len(counts))):
        first = last - counts[turn]
        here = slice(first * num_heads, last * num_heads)
        new[here].baddbmm_(keys[here].transpose(1, 2), after[here])
        if turn:
            before = torch.addcmul(grad_states[here], growth[here], after[here])
            if old is not None:
                before.baddbmm_(old[here].transpose(1, 2), new[here], alpha=-1)
            parents = after_NHKV[first - counts[turn - 1] : first]
            parents.index_add_(0, parents_N[first:last], before.reshape(-1, *sizes))
        last = first
    if old_NHLK is None:
        grad_old = deltas.new_empty(0)
    else:
        grad_old = (new @ states.transpose(1, 2)).neg_().view(old_NHLK.shape)
    grad_growth, grad_keys = (after * states).sum((1, 2)), after @ deltas.transpose(1, 2)
    return new.view(deltas_NHLV.shape), grad_old, grad_growth.view(growth_NH11.shape), grad_keys.view(keys_NHKL.shape)


def _build_gradients(
    _grad_states: Tensor, _grad_deltas: Tensor, old_NHLK: Tensor | None, growth_NH11: Tensor, keys_NHKL: Tensor,
    _states: Tensor, deltas_NHLV: Tensor, _turns: Tensor, _parents: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_old = deltas_NHLV.new_empty((0,) if old_NHLK is None else old_NHLK.shape)
    return (
        deltas_NHLV.new_empty(deltas_NHLV.shape), grad_old, growth_NH11.new_empty(growth_NH11.shape),
        keys_NHKL.new_empty(keys_NHKL.shape),
    )  # fmt: skip


def _save_scanned(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, new, old, growth, keys, turns, parents, _ = inputs
    states, deltas, _ = output
    ctx.save_for_backward(old, growth, keys, states, new if old is None else deltas, turns, parents)


def _differentiate_scan(ctx: Any, grad_states: Tensor, grad_deltas: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    old, *rest = ctx.saved_tensors
    new, grad_old, growth, keys = scan_chunks_backward(grad_states, grad_deltas, old, *rest)
    return None, new, None if old is None else grad_old, growth, keys, None, None, None


def _invert_unit_lower(matrices: Tensor) -> Tensor:
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return torch.linalg.solve_triangular(matrices, identity.expand(matrices.shape), upper=False, unitriangular=True)


def _save_inverse(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _differentiate_inverse(ctx: Any, grad: Tensor) -> Tensor:
    turned = ctx.saved_tensors[0].transpose(-1, -2)
    return (turned @ grad @ turned).neg().tril(-1)


def _read_states(states: Tensor, slots: Tensor) -> Tensor:
    return states[slots]


def _write_states(states: Tensor, slots: Tensor, values: Tensor) -> None:
    states.index_copy_(0, slots, values)


def _build_like(first: Tensor, *_rest: object) -> Tensor:
    return first.new_empty(first.shape)


def _build_stepped(mixed_TC: Tensor, *rest: Any) -> Tensor:
    states = rest[-2]
    return mixed_TC.new_empty((mixed_TC.shape[0], states.shape[1], states.shape[3]))


def _build_read(_query: Tensor, _key: Tensor, value_THV: Tensor, *_rest: object) -> Tensor:
    return value_THV.new_empty(value_THV.shape)


scan_chunks = define_op(
    "scan_chunks(Tensor initial, Tensor new, Tensor? old, Tensor growth, Tensor keys, Tensor turns, Tensor parents, "
    "Tensor ends) -> (Tensor, Tensor, Tensor)",
    run=_scan_chunks,
    build=_build_scanned,
)
"""Compute the states of chunks turn by turn: the state before each chunk [N, H, K, V], d of each chunk (empty without
`old`), and the states after the chunks `ends` [E, H, K, V].

`new` is U, `old` W, `growth` exp(G_last) and `keys` k exp(G_last - G) of the formulas of `recurrence`. Chunks are in
the order of their turns. `turns` [U, 2], on the CPU, has the numbers of chunks and of ends of each turn. `parents` [N]
is the place of a chunk's predecessor in the turn before, in the first turn a row of `initial`, which has no gradient;
`ends` are places in their turn.
"""
scan_chunks_backward = define_op(
    "scan_chunks_backward(Tensor grad_states, Tensor grad_deltas, Tensor? old, Tensor growth, Tensor keys, "
    "Tensor states, Tensor deltas, Tensor turns, Tensor parents) -> (Tensor, Tensor, Tensor, Tensor)",
    run=_scan_chunks_backward,
    build=_build_gradients,
)
torch.library.register_autograd("tunesmith::scan_chunks", _differentiate_scan, setup_context=_save_scanned)
invert_unit_lower = define_op("invert_unit_lower(Tensor matrices) -> Tensor", run=_invert_unit_lower, build=_build_like)
"""(I + A)^-1 [N, H, L, L] for the parts A of the matrices below the diagonal. cuBLAS takes many times as long for the
products of such small matrices with an inverse that it never forms."""
torch.library.register_autograd("tunesmith::invert_unit_lower", _differentiate_inverse, setup_context=_save_inverse)
read_states = define_op("read_states(Tensor states, Tensor slots) -> Tensor", run=_read_states, build=_read_states)
write_states = define_op(
    "write_states(Tensor(a!) states, Tensor slots, Tensor values) -> ()", run=_write_states, build=_write_states
)
"""states[slots], and states[slots] = values. torch's compiler would move a plain read behind the write that follows."""
step_conv = define_op(
    "step_conv(Tensor inputs, Tensor weight, Tensor? bias, bool has_silu, Tensor(a!) states, Tensor slots) -> Tensor",
    build=_build_like,
)
"""`SegmentTable.convolve` of one token for each slot, whose last inputs [W - 1, C] move on by one."""
step_delta = define_op(
    "step_delta(Tensor mixed, Tensor rate, Tensor step, Tensor a_log, Tensor dt_bias, float epsilon, "
    "Tensor(a!) states, Tensor slots) -> Tensor",
    build=_build_stepped,
)
"""`SegmentTable.apply_delta` of one token for each slot, whose matrices are updated."""
step_states = define_op(
    "step_states(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor(a!) states, Tensor slots) -> Tensor",
    build=_build_read,
)
"""The same of `SegmentTable.apply_rule` without rates."""
