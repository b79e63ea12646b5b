"""Selects tokens by statistics over all tokens of an update: covariance of logprob and advantage, or entropy.

Statistics are over the whole update, tokens are ordered by sequence, and ties are broken by that order, so a selection
does not depend on rows, chunks or prefix sharing.

Axes: E trained tokens of one update.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt

from tunesmith.algorithms.scores import TokenInputs
from tunesmith.errors import ConfigError

Fraction = Annotated[float, Field(gt=0, le=1)]
ENTROPY_TOLERANCE = 1e-5
"""Entropies (nats) this close to the threshold count as equal to it. The first tokens of the rollouts of a task have
one distribution, but their entropies are rounded differently unless they share a prefix."""


def compute_clip_cov_terms(
    tokens: TokenInputs,
    *,
    fraction: Fraction = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    seed: NonNegativeInt = 0,
) -> TokenInputs:
    """Mask floor(fraction E) random tokens among those whose covariance is within bounds (Clip-Cov).

    Cui et al. (2025), "The entropy mechanism of RL for reasoning language models", eqs. 11 and 12. Tokens of
    high covariance reduce the entropy most. The draw is seeded by `seed` and the step. An update of fewer than 1 /
    fraction tokens masks none. verl masks at least one token, and only tokens that PPO's clip does not stop.
    Metrics: `clip_cov_frac`, the share of masked tokens; `token_covariance`, the mean over tokens.
    """
    if covariance_low > covariance_high:
        raise ConfigError(
            f"covariance_low={covariance_low:g} in terms_args is above covariance_high={covariance_high:g}, so that no "
            "token is masked: swap them"
        )
    covariance_E = compute_token_covariances(tokens)
    candidates = np.flatnonzero((covariance_E >= covariance_low) & (covariance_E <= covariance_high))
    num_selected = min(_count(fraction, len(covariance_E)), len(candidates))
    rng = np.random.default_rng((seed, tokens.step))
    correction_E = np.ones(len(covariance_E))
    correction_E[rng.choice(candidates, size=num_selected, replace=False)] = 0.0
    metrics = {"train/clip_cov_frac": num_selected / max(len(covariance_E), 1)} | _measure(covariance_E)
    return replace(tokens, correction_E=correction_E, metrics=metrics)


def compute_kl_cov_terms(tokens: TokenInputs, *, fraction: Fraction = 2e-3) -> TokenInputs:
    """Select the floor(fraction E) tokens of highest covariance (KL-Cov; Cui et al., 2025, eq. 13).

    Of tokens of equal covariance the earlier ones are selected. Of these, tokens that the policy itself has just
    sampled need no penalty: |d| has no gradient at 0, and that of its rounded value would be a sign by chance. verl
    sets the old logprobs of such an update to the policy's for the same effect. The paper uses a fraction of 2e-3 for
    7B and 2e-4 for 32B models. verl selects at least one token. Metric: `token_covariance`, the mean over tokens.
    """
    covariance_E = compute_token_covariances(tokens)
    order = np.argsort(-covariance_E, kind="stable")
    is_selected_E = np.zeros(len(covariance_E), dtype=bool)
    is_selected_E[order[: _count(fraction, len(covariance_E))]] = True
    if tokens.is_unmoved_E is not None:
        is_selected_E &= ~tokens.is_unmoved_E
    return replace(tokens, is_selected_E=is_selected_E, metrics=_measure(covariance_E))


def compute_token_covariances(tokens: TokenInputs) -> np.ndarray:
    """(log p - mean)(A - mean) [E], with means over the update (Cui et al., 2025, eq. 10).

    p is the policy's probability of the token. Their mean is the covariance of log p and A.
    """
    assert tokens.logprobs_E is not None
    if tokens.logprobs_E.size == 0:
        return np.zeros(0)
    return (tokens.logprobs_E - tokens.logprobs_E.mean()) * (tokens.advantages_E - tokens.advantages_E.mean())


def find_top_entropy_tokens(tokens: TokenInputs, *, fraction: float) -> tuple[np.ndarray, dict[str, float]]:
    """Factor [E] of the policy loss: 1 for the `fraction` of the sampled tokens of highest entropy, 0 for the others.

    Wang et al. (2025), "Beyond the 80/20 rule", eq. 6: tokens whose entropy is at least the ceil(fraction E)-th largest
    of the update, so that tokens of equal entropy are kept together. Expert tokens have factor 1 and no part in the
    threshold. Metrics: `entropy_threshold`, and `entropy_masked_frac`, the share of masked tokens.
    """
    kept_E = np.ones(len(tokens.advantages_E))
    is_sampled_E = tokens.find_sampled()
    num_sampled = int(is_sampled_E.sum())
    if fraction == 1 or num_sampled == 0:
        return kept_E, {}
    assert tokens.entropies_E is not None
    sampled_entropies = tokens.entropies_E[is_sampled_E]
    num_kept = max(math.ceil(round(fraction * num_sampled, 6)), 1)
    threshold = float(np.partition(sampled_entropies, num_sampled - num_kept)[num_sampled - num_kept])
    kept_E[is_sampled_E & (tokens.entropies_E < threshold - ENTROPY_TOLERANCE)] = 0.0
    masked_frac = float((kept_E == 0).sum() / num_sampled)
    return kept_E, {"train/entropy_threshold": threshold, "train/entropy_masked_frac": masked_frac}


def _count(fraction: float, num_tokens: int) -> int:
    """floor(fraction * num_tokens), with products rounded so that 0.29 of 100 tokens are 29."""
    return math.floor(round(fraction * num_tokens, 6))


def _measure(covariance_E: np.ndarray) -> dict[str, float]:
    return {"train/token_covariance": float(covariance_E.mean())} if covariance_E.size else {}
