"""Recurrent layers on packed rows and tries: losses and gradients in float64 are those of separate sequences."""

from __future__ import annotations

import pytest
import torch

from tiny_models import RECURRENT
from trainable_models import build_trainable
from tunesmith.experience.samples import build_trie, concatenate_tries
from tunesmith.model.forward import recurrence
from tunesmith.model.forward.attention import CausalPlan, run_body
from tunesmith.trainer.tree_attention.plan import TreePlan
from tunesmith.types import Sample

CPU = torch.device("cpu")
# three levels: children of one to three tokens, which are shorter than the convolution, and a chunk of 64 tokens
PATHS = {
    "three levels": [(1, 2, 3), (1, 2, 4), (1, 2, 4, 5, 6), (1, 2, 4, 5, 6, 7), (1, 2, 4, 5, 8, 9, 10), (1, 11), (12,)],
    "over a chunk": [(*range(1, 62), 90), (*range(1, 62), 91, 92, 93), (*range(1, 62), 91, 92, *range(5, 75)), (1, 2)],
}


def build_row(paths: list[tuple[int, ...]]):
    """The trie of the paths; a sample's last token has no node."""
    samples = [
        Sample(
            token_ids=(*path, 0), is_sampled=(False,) * len(path) + (True,), logprobs=(0.0,) * (len(path) + 1),
            advantages=(0.0,) * (len(path) + 1), policy_versions=(None,) * (len(path) + 1), distribution_spans=(),
            group_index=0, trajectory_index=0,
        )
        for path in paths
    ]  # fmt: skip
    return concatenate_tries([build_trie(samples, range(len(samples)))])


def run_last(model, ids, positions, plan, lasts) -> torch.Tensor:
    return run_body(model, torch.as_tensor(ids)[None], torch.as_tensor(positions)[None], plan)[0][lasts]


def run_trie(model, paths) -> torch.Tensor:
    trie = build_row(paths)
    lasts = [int(trie.parent_E[list(trie.sample_E).index(index)]) for index in range(len(paths))]
    return run_last(model, trie.token_ids_T, trie.depth_T, TreePlan(trie, CPU), lasts)


def run_separately(model, paths) -> torch.Tensor:
    """Each path is a row of its own, of one segment."""
    return torch.cat([run_last(model, path, range(len(path)), CausalPlan([len(path)], CPU), [-1]) for path in paths])


def collect(model, hidden) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad((hidden * weights).sum(), parameters, allow_unused=True)
    return hidden.detach(), torch.cat([each.flatten() for each in gradients if each is not None])


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_on_a_trie_are_those_of_separate_rows(name, kind):
    model = build_trainable(name)
    found, expected = (collect(model, run(model, PATHS[kind])) for run in (run_trie, run_separately))
    tolerance = 1e-6 if name == "qwen3_5_moe" else 1e-12  # routers compute in float32
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


def drop_tail(table):
    """Each segment starts with an empty convolution."""
    return recurrence.SegmentTable(recurrence.list_sequences([each.end - each.start for each in table]), CPU)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_a_trie_whose_segments_forget_their_parents_is_found(name):
    """The comparison above sees the fault that the modeling code's own forward has."""
    model, trie = build_trainable(name), build_row(PATHS["three levels"])
    plan = TreePlan(trie, CPU)
    plan.segments = drop_tail(plan.segments._segments)
    lasts = [int(trie.parent_E[list(trie.sample_E).index(index)]) for index in range(len(PATHS["three levels"]))]
    broken = run_last(model, trie.token_ids_T, trie.depth_T, plan, lasts)
    assert (broken - run_separately(model, PATHS["three levels"])).abs().max() > 1e-2


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 130])
def test_chunks_of_the_gated_delta_rule_are_the_recurrence(num_tokens):
    """Against the formula of one token after the other, in float64."""
    torch.manual_seed(0)
    heads, size_k, size_v = 3, 5, 4
    query, key = (torch.randn(num_tokens, heads, size_k, dtype=torch.float64) for _ in range(2))
    key = key / key.norm(dim=-1, keepdim=True)
    value = torch.randn(num_tokens, heads, size_v, dtype=torch.float64)
    decay = -torch.rand(num_tokens, heads, dtype=torch.float64) * 3
    rate = torch.rand(num_tokens, heads, dtype=torch.float64)
    initial = torch.randn(2, heads, size_k, size_v, dtype=torch.float64)
    states = {0: {recurrence.DELTA: torch.cat([initial, torch.zeros_like(initial)])}}
    segment = recurrence.Segment(start=0, end=num_tokens, source=1, targets=(2, 0))
    found = recurrence.SegmentTable([segment], CPU, states).apply_delta_rule(0, query, key, value, decay, rate)
    state = initial[1]
    for token in range(num_tokens):
        state = decay[token].exp()[:, None, None] * state
        error = value[token] - torch.einsum("hkv,hk->hv", state, key[token])
        state = state + torch.einsum("hk,hv->hkv", key[token], rate[token, :, None] * error)
        torch.testing.assert_close(found[token], torch.einsum("hkv,hk->hv", state, query[token]), atol=1e-12, rtol=0)
    for slot, expected in enumerate([state, initial[1], state, torch.zeros_like(state)]):
        torch.testing.assert_close(states[0][recurrence.DELTA][slot], expected, atol=1e-12, rtol=0)
