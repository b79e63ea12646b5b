"""The trie compared with sets of prefixes: its nodes, ancestors and events."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.experience.samples import Trie, build_trie, concatenate_tries, read_array
from tunesmith.types import Sample


def build_sample(token_ids: list[int], is_sampled: list[bool]) -> Sample:
    n = len(token_ids)
    return Sample(
        token_ids=tuple(token_ids), is_sampled=tuple(is_sampled), logprobs=(0.0,) * n, advantages=(0.0,) * n,
        policy_versions=(None,) * n, distribution_spans=(), group_index=0, trajectory_index=0,
    )  # fmt: skip


def read_prefix(trie: Trie, node: int) -> tuple[int, ...]:
    """Tokens from the root to the node, by the ancestor rule that tree attention uses."""
    ancestors = [k for k in range(node + 1) if node < trie.subtree_end_T[k]]
    assert [trie.depth_T[k] for k in ancestors] == list(range(len(ancestors)))
    return tuple(trie.token_ids_T[ancestors])


def test_trie_by_hand():
    samples = [
        build_sample([5, 6, 1, 2], [False, False, True, True]),
        build_sample([5, 6, 1, 3], [False, False, True, True]),
        build_sample([5, 6, 0], [False, False, True]),
        build_sample([5, 9, 9], [False, False, False]),
    ]
    trie = build_trie(samples, [0, 1, 2, 3])
    assert trie.token_ids_T.tolist() == [5, 6, 1]
    assert trie.depth_T.tolist() == [0, 1, 2]
    assert trie.subtree_end_T.tolist() == [3, 3, 3]
    assert trie.parent_E.tolist() == [1, 2, 1, 2, 1]
    assert trie.target_E.tolist() == [1, 2, 1, 3, 0]
    assert trie.sample_E.tolist() == [0, 0, 1, 1, 2]
    assert trie.time_E.tolist() == [2, 3, 2, 3, 2]
    assert trie.num_flat_tokens == 3 + 3 + 2


def test_samples_without_trained_tokens_give_an_empty_trie():
    trie = build_trie([build_sample([1, 2], [False, False])], [0])
    assert trie.num_tokens == 0
    assert trie.parent_E.size == 0


samples_lists = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=7).map(
        lambda pairs: build_sample([t for t, _ in pairs], [False] + [b for _, b in pairs[1:]])
    ),
    max_size=6,
)


def list_events(samples: list[Sample]) -> Counter:
    return Counter(
        (sample.token_ids[:time], sample.token_ids[time], index, time)
        for index, sample in enumerate(samples)
        for time, is_sampled in enumerate(sample.is_sampled)
        if is_sampled
    )


def read_events(trie: Trie) -> Counter:
    events = zip(trie.parent_E, trie.target_E, trie.sample_E, trie.time_E, strict=True)
    return Counter((read_prefix(trie, node), target, index, time) for node, target, index, time in events)


@given(samples_lists)
def test_trie_has_one_node_per_prefix_and_one_event_per_sampled_token(samples):
    trie = build_trie(samples, range(len(samples)))
    needed = {prefix[: i + 1] for prefix, *_ in list_events(samples) for i in range(len(prefix))}
    prefixes = [read_prefix(trie, node) for node in range(trie.num_tokens)]
    assert len(prefixes) == len(set(prefixes))
    assert set(prefixes) == needed
    assert read_events(trie) == list_events(samples)


@given(samples_lists)
def test_concatenated_tries_do_not_attend_to_each_other(samples):
    trie = concatenate_tries([build_trie(samples, [index]) for index in range(len(samples))])
    assert trie.num_tokens == trie.num_flat_tokens
    assert read_events(trie) == list_events(samples)
    assert np.all(trie.subtree_end_T <= trie.num_tokens)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((), np.float64), ((1.5, -2, True), np.float64), ((None, 0, None, 3), np.float64), ((2**40, 0, -7), np.int64),
        ((True, False, True), bool), (np.array([1, 2]), np.float64),
    ],
)  # fmt: skip
def test_read_array_equals_numpy_conversion(values, dtype):
    ours, expected = read_array(values, dtype), np.array(list(values), dtype=dtype)
    assert ours.dtype == expected.dtype
    np.testing.assert_array_equal(ours, expected)


def test_an_out_of_range_number_is_an_error():
    with pytest.raises(OverflowError):
        read_array((1, 2**70), np.int64)
