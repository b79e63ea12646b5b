"""Tree attention against a dense mask, whole paths against plain causal attention, and flex attention's blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from tunesmith.experience.trie import Trie, build_trie, concatenate_tries
from tunesmith.model.attention import attend_masked
from tunesmith.trainer import attention, segments
from tunesmith.trainer.attention import TreePlan, build_block_mask, build_rule, find_blocks
from tunesmith.types import Sample


def build_random_trie(seed: int, *, num_groups: int = 3, max_length: int = 12, vocab: int = 2) -> Trie:
    rng = random.Random(seed)
    tries = []
    for _ in range(num_groups):
        samples = []
        for _ in range(rng.randrange(1, 5)):
            n = rng.randrange(2, max_length)
            samples.append(
                Sample(
                    token_ids=tuple(rng.randrange(vocab) for _ in range(n)), is_sampled=(False,) * (n - 1) + (True,),
                    logprobs=(0.0,) * n, advantages=(0.0,) * n, policy_versions=(None,) * n,
                    distributions=(None,) * n, group_index=0, trajectory_index=0,
                )
            )  # fmt: skip
        tries.append(build_trie(samples, range(len(samples))))
    return concatenate_tries(tries)


def build_mask(trie: Trie, window: int | None) -> torch.Tensor:
    """By walking from each node to its root."""
    mask = torch.zeros(trie.num_tokens, trie.num_tokens, dtype=torch.bool)
    path: list[int] = []
    for node, depth in enumerate(trie.depth_T):
        path = [*path[:depth], node]
        mask[node, path[-window:] if window else path] = True
    return mask


def draw_inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, num_tokens, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def run_with_gradients(attend, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    output = attend(*inputs)
    return [
        output,
        *torch.autograd.grad((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum(), inputs),
    ]


@pytest.mark.parametrize("max_hanging", [2, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("seed", range(4))
def test_tree_attention_equals_a_dense_mask(monkeypatch, seed, window, softcap, max_hanging):
    monkeypatch.setattr(segments, "MAX_HANGING_TOKENS", max_hanging)
    trie = build_random_trie(seed)
    mask = build_mask(trie, window)
    plan = TreePlan(trie, torch.device("cpu"))

    def ours(query, key, value):
        return plan.attend(None, query, key, value, scaling=0.4, sliding_window=window, softcap=softcap).transpose(1, 2)

    def theirs(query, key, value):
        return attend_masked(query, key, value, mask, scaling=0.4, softcap=softcap)

    inputs = draw_inputs(trie.num_tokens)
    for a, b in zip(run_with_gradients(ours, inputs), run_with_gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-6 if softcap else 1e-12)


def test_masks_are_made_once_for_all_layers():
    plan = TreePlan(build_random_trie(0), torch.device("cpu"))
    inputs = draw_inputs(plan._trie.num_tokens)
    for _ in range(2):
        plan.attend(None, *inputs, scaling=None, sliding_window=3, softcap=None)
        masks = [id(mask) for mask in plan._segments._masks.values()]
    plan.attend(None, *inputs, scaling=None, sliding_window=3, softcap=None)
    assert masks == [id(mask) for mask in plan._segments._masks.values()]


@given(st.integers(0, 1000), st.sampled_from([1, 3, 256]))
def test_segments_tile_the_row_and_hang_from_their_parents(seed, max_hanging):
    trie = build_random_trie(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MAX_HANGING_TOKENS", max_hanging)
        pieces = segments.cut_segments(trie)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (0, trie.num_tokens)
    mask = build_mask(trie, None)
    for piece in pieces:
        assert piece.parent is None or piece.end - piece.start <= max_hanging
        path = list(range(piece.start, piece.end))
        parent = piece.parent
        while parent is not None:
            path = [*range(pieces[parent].start, pieces[parent].end), *path]
            parent = pieces[parent].parent
        assert mask[piece.end - 1].nonzero()[:, 0].tolist() == path


@pytest.mark.parametrize("window", [None, 4])
def test_rule_equals_a_dense_mask(window):
    trie = build_random_trie(1)
    rule = build_rule(torch.from_numpy(trie.depth_T), torch.from_numpy(trie.subtree_end_T), window)
    node = torch.arange(trie.num_tokens)
    assert torch.equal(rule(node, node, node[:, None], node[None]), build_mask(trie, window))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_hold_what_they_say(monkeypatch, seed, window):
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 4)
    trie = build_random_trie(seed, num_groups=2, max_length=20)
    mask = build_mask(trie, window).numpy()
    is_seen, is_full = find_blocks(trie, window)
    assert not np.any(is_full & ~is_seen)
    for i, j in np.ndindex(is_seen.shape):
        block = mask[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        assert is_seen[i, j] or not block.any()
        assert not is_full[i, j] or block.all()
        if window is None:
            assert is_seen[i, j] == block.any()


@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_over_the_blocks_equals_a_dense_mask(window):
    trie = build_random_trie(3, num_groups=3, max_length=200)
    rule = build_rule(torch.from_numpy(trie.depth_T), torch.from_numpy(trie.subtree_end_T), window)
    block_mask = build_block_mask(trie, rule, window, torch.device("cpu"))
    query, key, value = (x.detach() for x in draw_inputs(trie.num_tokens, torch.float32))
    ours = flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)
    theirs = attend_masked(query, key, value, build_mask(trie, window), scaling=None, softcap=None)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
