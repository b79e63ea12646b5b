"""Tree attention on a CPU against a dense mask, and the schedule tables of the GPU kernels."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.experience.samples import EMPTY, Trie, build_trie, concatenate_tries
from tunesmith.model.forward.attention import AttentionOptions, CausalPlan, attend_masked
from tunesmith.trainer.tree_attention import cpu as segments
from tunesmith.trainer.tree_attention import plan as attention
from tunesmith.trainer.tree_attention.plan import TreePlan
from tunesmith.trainer.tree_attention.tile_schedule import (
    PADDING,
    TILINGS,
    Tile,
    Tiling,
    build_table,
    choose_tiling,
    classify_tiles,
    compute_table_size,
    count_partial_sums,
    pad_trie,
)
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
                    distribution_spans=(), group_index=0, trajectory_index=0,
                )
            )  # fmt: skip
        tries.append(build_trie(samples, range(len(samples))))
    return concatenate_tries(tries)


def build_mask(trie: Trie, window: int | None) -> torch.Tensor:
    """Dense mask by walking from each node to its root."""
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


@pytest.mark.parametrize("max_child_tokens", [2, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("seed", range(4))
def test_tree_attention_equals_a_dense_mask(monkeypatch, seed, window, softcap, max_child_tokens):
    monkeypatch.setattr(segments, "MAX_CHILD_SEGMENT_TOKENS", max_child_tokens)
    trie = build_random_trie(seed)
    mask = build_mask(trie, window)
    plan = TreePlan(trie, torch.device("cpu"))

    def ours(query, key, value):
        options = AttentionOptions(scaling=0.4, sliding_window=window, softcap=softcap)
        return plan.attend(None, query, key, value, options).transpose(1, 2)

    def theirs(query, key, value):
        return attend_masked(query, key, value, mask, AttentionOptions(scaling=0.4, softcap=softcap))

    inputs = draw_inputs(trie.num_tokens)
    for a, b in zip(run_with_gradients(ours, inputs), run_with_gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-6 if softcap else 1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_output_is_contiguous(softcap):
    """As that of transformers' own attention functions: some modeling code (Afmoe) calls `view` on it."""
    trie = build_random_trie(0)
    inputs, options = draw_inputs(trie.num_tokens), AttentionOptions(softcap=softcap)
    for plan in (TreePlan(trie, torch.device("cpu")), CausalPlan([trie.num_tokens], torch.device("cpu"))):
        assert plan.attend(None, *inputs, options).is_contiguous()


def test_masks_are_cached_across_layers():
    plan = TreePlan(build_random_trie(0), torch.device("cpu"))
    inputs = draw_inputs(plan._trie.num_tokens)
    for _ in range(2):
        plan.attend(None, *inputs, AttentionOptions(sliding_window=3))
        masks = [id(mask) for mask in plan._segments._masks.values()]
    plan.attend(None, *inputs, AttentionOptions(sliding_window=3))
    assert masks == [id(mask) for mask in plan._segments._masks.values()]


@given(st.integers(0, 1000), st.sampled_from([1, 3, 256]))
def test_segments_partition_the_row_and_name_their_parents(seed, max_child_tokens):
    trie = build_random_trie(seed)
    pieces = segments.split_segments(trie, max_child_tokens)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (0, trie.num_tokens)
    mask = build_mask(trie, None)
    for piece in pieces:
        assert piece.parent is None or piece.end - piece.start <= max_child_tokens
        path = list(range(piece.start, piece.end))
        parent = piece.parent
        while parent is not None:
            path = [*range(pieces[parent].start, pieces[parent].end), *path]
            parent = pieces[parent].parent
        assert mask[piece.end - 1].nonzero()[:, 0].tolist() == path


@pytest.mark.parametrize("window", [None, 4])
def test_dense_mask_equals_a_walk_to_the_root(window):
    trie = build_random_trie(1)
    assert torch.equal(attention.build_mask(trie, window), build_mask(trie, window))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("sizes", [(4, 4), (8, 2), (2, 8)])
@pytest.mark.parametrize("seed", range(5))
def test_tiles_are_classified_correctly(seed, sizes, window):
    trie = build_random_trie(seed, num_groups=2, max_length=20)
    mask = build_mask(trie, window).numpy()
    is_visible, is_full = classify_tiles(trie, window, *sizes)
    assert not np.any(is_full & ~is_visible)
    for i, j in np.ndindex(is_visible.shape):
        tile = mask[sizes[0] * i : sizes[0] * (i + 1), sizes[1] * j : sizes[1] * (j + 1)]
        assert is_visible[i, j] or not tile.any()
        assert not is_full[i, j] or tile.all()


SMALL = Tiling(Tile(4, 16, 1, 1), Tile(4, 16, 1, 1), Tile(8, 4, 1, 1))


def split_table(table: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries of query tiles [R, 4], of splits of key tiles [K + P, 5] and of partial sums [P, 3]."""
    num_queries, num_keys = num_tokens // 4, num_tokens // 8
    num_places = count_partial_sums(num_keys)
    sizes = [2 * num_tokens, 4 * num_queries, 5 * (num_keys + num_places), 3 * num_places]
    _, queries, splits, sums, _ = np.split(table, np.cumsum(sizes))
    return queries.reshape(-1, 4), splits.reshape(-1, 5), sums.reshape(-1, 3)


@pytest.mark.parametrize("window", [None, 5])
def test_table_lists_every_tile_once_full_ones_first(window):
    trie = pad_to(build_random_trie(3, num_groups=3, max_length=60), 16)
    num_tokens = trie.num_tokens
    table = build_table(trie, window, SMALL)
    assert len(table) <= compute_table_size(num_tokens, SMALL)
    assert table[:num_tokens].tolist() == trie.subtree_end_T.tolist()
    assert table[num_tokens : 2 * num_tokens].tolist() == trie.depth_T.tolist()
    by_query, by_key = (
        classify_tiles(trie, window, 4, 16),
        tuple(tiles.T for tiles in classify_tiles(trie, window, 4, 8)),
    )
    queries, splits, _ = split_table(table, num_tokens)
    assert len(splits) == num_tokens // 8 + count_partial_sums(num_tokens // 8)
    assert sorted(set(queries[:, 0].tolist())) == list(range(num_tokens // 4))
    assert np.all(np.diff(queries[:, 3] - queries[:, 1]) <= 0)
    for rows, (is_visible, is_full) in ((queries, by_query), (splits[splits[:, 4] < 0], by_key)):
        for row, begin, middle, end in rows[rows[:, 0] >= 0, :4]:
            assert table[begin:middle].tolist() == np.flatnonzero(is_full[row]).tolist()
            assert table[middle:end].tolist() == np.flatnonzero(is_visible[row] & ~is_full[row]).tolist()


def build_prompt_with_answers(num_answers: int) -> Trie:
    """A prompt of 20 tokens before answers of 20, in tiles of 8 keys."""
    answers = range(num_answers)
    return pad_to(
        Trie(
            token_ids_T=np.arange(20 + 20 * num_answers),
            depth_T=np.concatenate([np.arange(20), *(np.arange(20, 40) for _ in answers)]),
            subtree_end_T=np.repeat([20 + 20 * num_answers, *(40 + 20 * i for i in answers)], 20),
            parent_E=EMPTY, target_E=EMPTY, sample_E=EMPTY, time_E=EMPTY, num_flat_tokens=40 * num_answers,
        ),
        8,
    )  # fmt: skip


@pytest.mark.parametrize("num_answers", [1, 2, 30])
def test_heavy_key_tiles_are_split_into_equal_work(num_answers):
    trie = build_prompt_with_answers(num_answers)
    num_tokens, num_rows = trie.num_tokens, trie.num_tokens // 8
    table = build_table(trie, None, SMALL)
    _, splits, sums = split_table(table, num_tokens)
    splits, sums = splits[splits[:, 0] >= 0], sums[sums[:, 0] >= 0]
    is_visible, is_full = (found.T for found in classify_tiles(trie, None, 4, 8))
    work = np.array([end - begin for _, begin, _, end, _ in splits])
    assert np.all(np.diff(work) <= 0)
    assert bool(len(sums)) == (num_answers > 1)
    assert work.max() <= max(8, 2 * np.ceil(is_visible.sum() / num_rows))
    for tile in range(num_rows):
        own = splits[splits[:, 0] == tile]
        whole = [table[place] for _, begin, middle, _, _ in own for place in range(begin, middle)]
        mixed = [table[place] for _, _, middle, end, _ in own for place in range(middle, end)]
        assert sorted(whole) == np.flatnonzero(is_full[tile]).tolist()
        assert sorted(mixed) == np.flatnonzero(is_visible[tile] & ~is_full[tile]).tolist()
        places = [place for row, first, last in sums if row == tile for place in range(first, last)]
        assert sorted(own[:, 4]) == (places or [-1])
    assert sorted(splits[:, 4][splits[:, 4] >= 0]) == list(range(sums[-1, 2] if len(sums) else 0))
    assert (splits[:, 4] >= 0).sum() <= count_partial_sums(num_rows)


def test_padding_attends_only_to_itself():
    trie = build_random_trie(2)
    padded = pad_trie(trie)
    mask = build_mask(padded, None)
    assert padded.num_tokens % PADDING == 0
    assert padded.num_tokens - trie.num_tokens < PADDING
    assert torch.equal(mask[: trie.num_tokens, : trie.num_tokens], build_mask(trie, None))
    assert torch.equal(
        mask[trie.num_tokens :, trie.num_tokens :], torch.eye(padded.num_tokens - trie.num_tokens).bool()
    )
    assert not mask[trie.num_tokens :, : trie.num_tokens].any()


def test_tilings_share_the_schedule_of_queries_and_divide_padded_rows():
    for tiling in TILINGS:
        assert (tiling.forward.rows, tiling.forward.steps) == (tiling.backward_query.rows, tiling.backward_query.steps)
        for tile in (tiling.forward, tiling.backward_key_value):
            assert PADDING % tile.rows == PADDING % tile.steps == 0


def test_a_tiling_is_chosen_by_head_size_type_and_gpu():
    chosen = [choose_tiling(size, is_wide=False) for size in (16, 64, 80, 128, 192, 256, 512)]
    assert chosen == [0, 0, 1, 1, 2, 2, 3]
    assert [choose_tiling(size, is_wide=False, is_hopper=False) for size in (64, 128, 256, 512)] == [0, 4, 5, 6]
    assert choose_tiling(64, is_wide=True) == 3


def build_path(length: int) -> Trie:
    sample = Sample(
        token_ids=(1,) * (length + 1), is_sampled=(False,) * length + (True,), logprobs=(0.0,) * (length + 1),
        advantages=(0.0,) * (length + 1), policy_versions=(None,) * (length + 1),
        distribution_spans=(), group_index=0, trajectory_index=0,
    )  # fmt: skip
    return build_trie([sample], [0])


def pad_to(trie: Trie, multiple: int) -> Trie:
    """Pad to whole tiles of another size with paths of one token."""
    return concatenate_tries([trie, *[build_path(1)] * (-trie.num_tokens % multiple)])
