"""Sampled tokens follow the shared definition of the distribution and depend on seed and position only."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tunesmith.engine.batch import sampler
from tunesmith.engine.batch.sampler import MAX_CACHED_ROWS, hash_uniforms, sample_tokens
from tunesmith.model.forward.distribution import truncate_logits
from tunesmith.types import Distribution

DISTRIBUTIONS = [
    Distribution(),
    Distribution(temperature=0.7),
    Distribution(temperature=0),
    Distribution(top_k=5),
    Distribution(top_p=0.8),
    Distribution(min_p=0.2),
    Distribution(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
    Distribution(logit_bias=((3, 2.5), (5, -4.0)), top_p=0.95),
    Distribution(temperature=0, logit_bias=((7, 50.0),)),
    Distribution(top_p=0.999, temperature=2.0),
]


def build_logits(num_rows: int, vocab_size: int = 400) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 2


def test_uniforms_are_those_of_splitmix64() -> None:
    mixed_zero = 0xE220A8397B1DCDAF  # the generator's first output for state 0, as published
    state = (mixed_zero + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    expected = ((state ^ (state >> 31)) >> 11) / 2**53
    assert hash_uniforms([0], [0]).tolist() == [expected]


def test_uniforms_are_spread_evenly_over_seeds_and_positions() -> None:
    for seeds, positions in [(range(20_000), [5] * 20_000), ([9] * 20_000, range(20_000))]:
        counts = np.histogram(hash_uniforms(list(seeds), list(positions)), bins=20, range=(0, 1))[0]
        chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
        assert chi_square < 43.8  # 99.9 % of 19 degrees of freedom


def test_seeds_of_any_size_are_reduced_modulo_2_to_64() -> None:
    values = hash_uniforms([-1, 2**64 - 1, 2**70, 0], [1, 1, 1, 1]).tolist()
    assert values[0] == values[1]
    assert values[2] == values[3]


def test_uniforms_are_the_same_in_small_and_in_large_batches() -> None:
    seeds, positions = [*range(MAX_CACHED_ROWS + 1)], [*range(40, 41 + MAX_CACHED_ROWS)]
    together = hash_uniforms(seeds, positions).tolist()
    assert together == [
        hash_uniforms([seed], [position]).item() for seed, position in zip(seeds, positions, strict=True)
    ]


def test_mixed_rows_agree_with_the_shared_definition() -> None:
    logits = build_logits(len(DISTRIBUTIONS))
    for seed in range(20):
        sampled = sample_tokens(logits.clone(), DISTRIBUTIONS, [seed] * len(DISTRIBUTIONS), range(len(DISTRIBUTIONS)))
        for row, distribution in enumerate(DISTRIBUTIONS):
            expected = truncate_logits(logits[row : row + 1], distribution).log_softmax(-1)[0]
            token_id = sampled.token_ids[row]
            assert expected[token_id] > -math.inf
            assert sampled.logprobs[row] == pytest.approx(expected[token_id].item(), abs=1e-5)
            if distribution.temperature == 0:
                assert token_id == expected.argmax().item()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_row_samples_the_same_token_alone_and_in_a_batch(distribution: Distribution) -> None:
    logits = build_logits(len(DISTRIBUTIONS))
    row = DISTRIBUTIONS.index(distribution)
    seeds, positions = [11] * len(DISTRIBUTIONS), range(40, 40 + len(DISTRIBUTIONS))
    together = sample_tokens(logits.clone(), DISTRIBUTIONS, seeds, positions)
    alone = sample_tokens(logits[row : row + 1].clone(), [distribution], [11], [40 + row])
    assert (together.token_ids[row], together.logprobs[row]) == (alone.token_ids[0], alone.logprobs[0])


@pytest.mark.parametrize("distribution", [Distribution(), Distribution(temperature=1.5, top_k=6, top_p=0.9)])
def test_sampled_frequencies_fit_the_distribution(distribution: Distribution) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -2.0, 1.5, -math.inf]])
    expected = truncate_logits(logits, distribution).softmax(-1)[0]
    num_draws = 20_000
    sampled = sample_tokens(logits.repeat(num_draws, 1), [distribution] * num_draws, range(num_draws), [3] * num_draws)
    counts = torch.bincount(torch.tensor(sampled.token_ids), minlength=8).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = expected[possible] * num_draws
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum().item()
    assert chi_square < 22.5  # 99.9 % of six degrees of freedom, the most any case has


def test_top_p_beyond_the_first_candidates_sorts_the_vocabulary() -> None:
    logits = build_logits(2, vocab_size=3000) * 0.01
    distribution = Distribution(top_p=0.5)
    expected = truncate_logits(logits, distribution).log_softmax(-1)
    sampled = sample_tokens(logits.clone(), [distribution, Distribution(top_p=0.001)], [1, 2], [0, 0])
    assert sampled.logprobs[0] == pytest.approx(expected[0, sampled.token_ids[0]].item(), abs=1e-4)
    assert sampled.logprobs[1] > -2


def test_the_last_token_of_the_vocabulary_can_be_sampled() -> None:
    logits = torch.full((4000, 3), -math.inf)
    logits[:, 2] = 0.0
    sampled = sample_tokens(logits, [Distribution()] * 4000, range(4000), [0] * 4000)
    assert set(sampled.token_ids) == {2}
    assert set(sampled.logprobs) == {0.0}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("vocab_size", [400, 3000])
def test_rows_with_non_finite_logits_are_marked_and_others_are_unchanged(value: float, vocab_size: int) -> None:
    logits = build_logits(3, vocab_size=vocab_size)
    expected = sample_tokens(logits.clone(), [Distribution()] * 3, [1, 2, 3], [0, 0, 0])
    logits[1, 5] = value
    sampled = sample_tokens(logits, [Distribution()] * 3, [1, 2, 3], [0, 0, 0])
    assert list(map(math.isfinite, sampled.logprobs)) == [True, False, True]
    assert (sampled.token_ids[0], sampled.token_ids[2]) == (expected.token_ids[0], expected.token_ids[2])


@pytest.mark.parametrize("vocab_size", [1, 7, 400, 2048, 5003])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_tokens_chosen_in_numpy_are_those_chosen_in_pytorch(vocab_size: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_rows)
    for scale in (0.1, 1.0, 8.0, 60.0):
        for seed in range(20):
            logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
            logits[:, 1::3] = -math.inf
            weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
            uniforms = hash_uniforms(range(num_rows), [seed] * num_rows)
            is_greedy = [seed % 2 == 1 and row % 3 == 0 for row in range(num_rows)]
            inputs = (weights, logits.argmax(dim=1), is_greedy, uniforms)
            on_host, expected = sampler._choose_on_host(*inputs), sampler._choose(*inputs)
            assert on_host.token_ids == expected.token_ids
            assert on_host.logprobs == pytest.approx(expected.logprobs, rel=1e-15, abs=1e-15)


def test_the_largest_uniform_number_samples_a_possible_token() -> None:
    logits = build_logits(3)
    logits[:, 300:] = -math.inf
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
    uniforms = np.full(3, 1 - 2.0**-53)
    inputs = (weights, None, [False] * 3, uniforms)
    assert sampler._choose_on_host(*inputs).token_ids == sampler._choose(*inputs).token_ids == [299] * 3


def test_logits_may_require_gradients() -> None:
    logits = build_logits(2).requires_grad_() * 1.0
    distributions = [Distribution()] * 2
    expected = sample_tokens(logits.detach().clone(), distributions, [1, 2], [3, 4])
    assert sample_tokens(logits, distributions, [1, 2], [3, 4]) == expected


def test_entropies_and_top_logprobs_are_those_of_the_distributions_sampled_from() -> None:
    logits = torch.randn(len(DISTRIBUTIONS), 97, generator=torch.Generator().manual_seed(4)) * 3
    expected = [
        truncate_logits(row[None].double(), distribution)[0].log_softmax(dim=0)
        for row, distribution in zip(logits, DISTRIBUTIONS, strict=True)
    ]
    seeds = range(len(DISTRIBUTIONS))
    sampled = sample_tokens(logits.clone(), DISTRIBUTIONS, seeds, seeds, has_entropies=True, num_top=5)
    assert sampled.entropies is not None and sampled.top_logprobs is not None
    for entropy, top, logprobs in zip(sampled.entropies, sampled.top_logprobs, expected, strict=True):
        probs = logprobs.exp()
        assert entropy == pytest.approx(-float((probs * logprobs.clamp(min=-1e9)).sum()), abs=1e-5)
        assert len(top) == min(5, int((probs > 0).sum()))
        best = logprobs.topk(len(top))
        assert [token_id for token_id, _ in top] == best.indices.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(best.values.tolist(), abs=1e-5)
    plain = sample_tokens(logits.clone(), DISTRIBUTIONS, seeds, seeds)
    assert (plain.token_ids, plain.logprobs) == (sampled.token_ids, sampled.logprobs)
    assert plain.entropies is plain.top_logprobs is None
