"""Rows contain every trained event once, respect the token budget, and share prefixes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tunesmith.experience.samples import Trie
from tunesmith.trainer.packing import compute_cost, pack_samples
from tunesmith.types import Sample


def build_sample(token_ids: list[int], group: int = 0, *, num_sampled: int = 1) -> Sample:
    n = len(token_ids)
    return Sample(
        token_ids=tuple(token_ids), is_sampled=(False,) * (n - num_sampled) + (True,) * num_sampled,
        logprobs=(0.0,) * n, advantages=(0.0,) * n, policy_versions=(None,) * n, distribution_spans=(),
        group_index=group, trajectory_index=group,
    )  # fmt: skip


def pack(samples: list[Sample], max_tokens: int, has_sharing: bool = True) -> list[Trie]:
    return pack_samples(samples, max_tokens_per_row=max_tokens, has_prefix_sharing=has_sharing, hidden_size=8)


def test_only_samples_of_a_group_share_their_prompt():
    samples = [build_sample([1, 2, 3, 4]), build_sample([1, 2, 3, 5]), build_sample([1, 2, 3, 4], group=1)]
    (row,) = pack(samples, 100)
    assert (row.num_tokens, row.num_flat_tokens) == (6, 9)
    (row,) = pack(samples, 100, has_sharing=False)
    assert (row.num_tokens, row.num_flat_tokens) == (9, 9)


def test_a_trie_longer_than_a_row_is_split():
    samples = [build_sample([1, 2, first, last, 0]) for first in (3, 4) for last in (5, 6)]
    rows = pack(samples, 6)
    assert [row.num_tokens for row in rows] == [5, 5]


def test_a_path_longer_than_a_row_is_a_row_of_its_own():
    rows = pack([build_sample(list(range(20))), build_sample([1, 2], group=1)], 10)
    assert sorted(row.num_tokens for row in rows) == [1, 19]


def test_rows_are_balanced():
    samples = [build_sample([*range(length), 0], group) for group, length in enumerate([9, 1, 8, 2, 7, 3])]
    assert [row.num_tokens for row in pack(samples, 15)] == [15, 15]


def test_no_trained_token_gives_no_row():
    assert pack([], 10) == []
    assert pack([build_sample([1, 2], num_sampled=0)], 10) == []


def test_cost_grows_with_tokens_and_with_pairs():
    (long,), (short,) = pack([build_sample(list(range(9)))], 100), pack([build_sample([1, 2])], 100)
    assert compute_cost(short, hidden_size=8) == 1 + 1 / 48
    assert compute_cost(long, hidden_size=8) == 8 + 36 / 48


@given(
    st.lists(
        st.builds(
            lambda tokens, group: build_sample([9, *tokens], group, num_sampled=len(tokens) // 2),
            st.lists(st.integers(0, 1), min_size=1, max_size=8),
            st.integers(0, 2),
        ),
        max_size=8,
    ),
    st.integers(1, 20),
    st.booleans(),
)
def test_rows_hold_every_event_once_within_the_budget(samples, max_tokens, has_sharing):
    rows = pack(samples, max_tokens, has_sharing)
    events = Counter((int(s), int(t)) for row in rows for s, t in zip(row.sample_E, row.time_E, strict=True))
    assert events == Counter(
        (index, time) for index, sample in enumerate(samples) for time, m in enumerate(sample.is_sampled) if m
    )
    for row in rows:
        assert row.num_tokens <= max_tokens or len(set(row.sample_E.tolist())) == 1
