"""Recurrent layers on packed rows and tries: losses and gradients in float64 are those of separate sequences."""

from __future__ import annotations

import pytest
import torch

from recurrent_paths import PATHS, build_row, collect, find_ends, run_last, run_separately, run_trie
from tiny_models import RECURRENT
from trainable_models import build_trainable
from tunesmith.model.forward import recurrence
from tunesmith.model.forward.attention import CausalPlan
from tunesmith.trainer.tree_attention.cpu import split_segments
from tunesmith.trainer.tree_attention.plan import TreePlan

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_on_a_trie_are_those_of_separate_rows(name, kind):
    model = build_trainable(name)
    found, expected = (collect(model, run(model, PATHS[kind])) for run in (run_trie, run_separately))
    tolerance = 1e-12 if name in ("lfm2", "qwen3_5", "qwen3_next") else 1e-6  # others compute parts in float32
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("lengths", [[3, 4], [1, 1, 5], [63, 64, 65, 2], [1, 130, 1]])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_sequences_of_a_row_do_not_touch_each_other(name, lengths):
    model = build_trainable(name)
    paths = [tuple(range(1 + index, 1 + index + length)) for index, length in enumerate(lengths)]
    paths = [tuple(token % 97 for token in path) for path in paths]
    ids, ends = [token for path in paths for token in path], torch.tensor(lengths).cumsum(0) - 1
    positions = [position for length in lengths for position in range(length)]
    found = collect(model, run_last(model, ids, positions, CausalPlan(lengths, CPU), ends))
    for ours, theirs in zip(found, collect(model, run_separately(model, paths)), strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_a_trie_whose_segments_forget_their_parents_is_found(name):
    """The comparison above sees the fault that the modeling code's own forward has."""
    model, paths = build_trainable(name), PATHS["three levels"]
    trie = build_row(paths)
    plan, lengths = TreePlan(trie, CPU), [each.end - each.start for each in split_segments(trie)]
    plan.segments = recurrence.SegmentTable(recurrence.list_sequences(lengths), CPU)
    broken = run_last(model, trie.token_ids_T, trie.depth_T, plan, find_ends(trie, len(paths)))
    assert (broken - run_separately(model, paths)).abs().max() > 1e-2


@pytest.mark.parametrize("has_rates", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 130])
def test_chunks_of_the_gated_delta_rule_and_of_mamba_2_are_the_recurrence(num_tokens, has_rates):
    """Against the formula of one token after the other, in float64."""
    torch.manual_seed(0)
    heads, size_k, size_v = 3, 5, 4
    query, key = (torch.randn(num_tokens, heads, size_k, dtype=torch.float64) for _ in range(2))
    key = key / key.norm(dim=-1, keepdim=True)
    value = torch.randn(num_tokens, heads, size_v, dtype=torch.float64)
    decay = -torch.rand(num_tokens, heads, dtype=torch.float64) * 3
    rate = torch.rand(num_tokens, heads, dtype=torch.float64)
    initial = torch.randn(2, heads, size_k, size_v, dtype=torch.float64)
    states = {0: {recurrence.MATRIX: torch.cat([initial, torch.zeros_like(initial)])}}
    segment = recurrence.Segment(start=0, end=num_tokens, source=1, targets=(2, 0))
    table = recurrence.SegmentTable([segment], CPU, states)
    found = table.select_layer(0).apply_rule(query, key, value, decay, rate if has_rates else None)
    state = initial[1]
    for token in range(num_tokens):
        state = decay[token].exp()[:, None, None] * state
        new = value[token]
        if has_rates:
            new = rate[token, :, None] * (new - torch.einsum("hkv,hk->hv", state, key[token]))
        state = state + torch.einsum("hk,hv->hkv", key[token], new)
        torch.testing.assert_close(found[token], torch.einsum("hkv,hk->hv", state, query[token]), atol=1e-12, rtol=0)
    for slot, expected in enumerate([state, initial[1], state, torch.zeros_like(state)]):
        torch.testing.assert_close(states[0][recurrence.MATRIX][slot], expected, atol=1e-12, rtol=0)
