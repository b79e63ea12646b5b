"""Reference implementation of updates: every formula on padded tensors [Q, T] of sequences and their sampled tokens.

Nothing here comes from the package but the records that go in. Logprobs are those of plain forwards of single samples.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from test_algorithm_gradients import build_batch, score_plainly
from torch import Tensor

from tunesmith.algorithms.table import ALGORITHMS, AlgorithmEntry
from tunesmith.trainer.update import StepScores
from tunesmith.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Per-token inputs; rows are trajectories, with branches concatenated."""

    logprobs: Tensor
    """Under the policy, with gradient."""
    sampler: Tensor
    proximal: Tensor
    reference: Tensor
    advantages: Tensor
    is_real: Tensor
    is_expert: Tensor
    """Per sequence."""

    @property
    def is_sampled(self) -> Tensor:
        return self.is_real & ~self.is_expert[:, None]


def pad(samples: list[Sample], values: list[Tensor]) -> Tensor:
    """Values per sample and sampled token as [Q, T], padded with zeros."""
    rows: dict[int, list[Tensor]] = {}
    for sample, row in zip(samples, values, strict=True):
        rows.setdefault(sample.trajectory_index, []).append(row)
    return torch.nn.utils.rnn.pad_sequence([torch.cat(parts) for parts in rows.values()], batch_first=True)


def select(sample: Sample, values) -> Tensor:
    kept = [value for value, is_sampled in zip(values, sample.is_sampled, strict=True) if is_sampled]
    return torch.tensor(kept, dtype=torch.float64)


def build_off_policy(model, labels: list[float], groups: list[int], *, experts=(), noise: float = 0.4, seed: int = 0):
    """Samples whose sampler logprobs have noise of `noise` nats, and proximal logprobs that differ from both."""
    rng = random.Random(seed)
    samples, proximal = [], []
    for sample in build_batch(labels, groups, experts=experts, seed=seed):
        with torch.no_grad():
            exact = iter(score_plainly(model, sample).tolist())
        logprobs = [next(exact) if is_sampled else 0.0 for is_sampled in sample.is_sampled]
        proximal.append(np.asarray([value + noise * rng.gauss(0, 0.5) for value in logprobs]))
        shifted = [
            value + noise * rng.gauss(0, 1) if is_sampled else 0.0
            for value, is_sampled in zip(logprobs, sample.is_sampled, strict=True)
        ]
        samples.append(sample if sample.is_expert else replace(sample, logprobs=tuple(shifted)))
    return samples, StepScores(columns={"proximal_logprobs_E": proximal}, is_weighted=True)


def read_tokens(model, samples: list[Sample], *, proximal: StepScores | None = None, reference=None) -> Tokens:
    lengths = pad(samples, [torch.ones(sum(sample.is_sampled)) for sample in samples])
    sampler = pad(samples, [select(sample, sample.logprobs) for sample in samples])
    logprobs = pad(samples, [score_plainly(model, sample) for sample in samples])
    scored = sampler
    if proximal is not None:
        scored = pad(
            samples, [select(*each) for each in zip(samples, proximal.columns["proximal_logprobs_E"], strict=True)]
        )
    with torch.no_grad():
        reference_logprobs = (
            sampler if reference is None else pad(samples, [score_plainly(reference, one) for one in samples])
        )
    is_expert = {sample.trajectory_index: sample.is_expert for sample in samples}
    return Tokens(
        logprobs=logprobs,
        sampler=sampler,
        proximal=scored,
        reference=reference_logprobs,
        advantages=pad(samples, [select(sample, sample.advantages) for sample in samples]),
        is_real=lengths > 0,
        is_expert=torch.tensor(list(is_expert.values())),
    )


def mean_rows(values: Tensor, kept: Tensor) -> Tensor:
    """The mean over each sequence, as [Q, 1]."""
    return (values * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)


def aggregate(losses: Tensor, kept: Tensor, aggregation: str) -> Tensor:
    """`kept` are the tokens of the denominator, masked ones included."""
    losses = losses * kept
    num_sequences = kept.any(1).sum()
    if aggregation == "token-mean":
        return losses.sum() / kept.sum()
    if aggregation == "seq-mean-token-sum":
        return losses.sum() / num_sequences
    assert aggregation == "seq-mean-token-mean"
    return mean_rows(losses, kept).sum() / num_sequences


def weigh(log_ratio: Tensor, kept: Tensor, level: str) -> Tensor:
    """Ratios of tokens, of sequences, or their geometric means."""
    log_ratio = log_ratio * kept
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    elif level == "geometric":
        log_ratio = mean_rows(log_ratio, kept).expand_as(log_ratio)
    return log_ratio.exp()


def correct(tokens: Tokens, correction: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Old logprobs of the loss, importance weights, and the tokens that the mask keeps."""
    importance, mask = correction.get("importance", "none"), correction.get("mask")
    log_ratio = tokens.proximal - tokens.sampler
    weights, is_kept = torch.ones_like(log_ratio), torch.ones_like(tokens.is_real)
    if importance != "none":
        weights = weigh(log_ratio, tokens.is_sampled, importance)
        weights = weights.clamp(correction.get("floor", 0.0), correction.get("cap", 2.0))
    if mask is not None:
        ratio = weigh(log_ratio, tokens.is_sampled, mask["level"])
        is_kept = (ratio >= mask["low"]) & (ratio <= mask["high"])
    if (delta := correction.get("negative_sequence_delta")) is not None:
        distance = mean_rows(tokens.sampler - tokens.logprobs.detach(), tokens.is_sampled)
        is_kept = is_kept & ~((tokens.advantages < 0) & (distance > delta))
    return tokens.sampler if importance == "none" else tokens.proximal, weights, is_kept


def estimate_kl(tokens: Tokens, estimator: str) -> Tensor:
    d = tokens.logprobs - tokens.reference
    k3 = (-d).exp() - 1 + d
    ratio = (tokens.logprobs - tokens.sampler).exp().clamp(max=2)
    return {"k1": d, "k2": d.square() / 2, "k3": k3, "abs": d.abs(), "corrected_k3": ratio * k3}[estimator]


def compute_ppo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    a, ratio = tokens.advantages, (tokens.logprobs - old).exp()
    upper = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    return torch.where(a < 0, torch.minimum(upper, -3 * a), upper)


def compute_reinforce_losses(tokens: Tokens, old: Tensor) -> Tensor:
    return -tokens.advantages * (tokens.logprobs.detach() - old).exp().clamp(max=2) * tokens.logprobs


def compute_importance_losses(tokens: Tokens, old: Tensor) -> Tensor:
    return -tokens.advantages * (tokens.logprobs - old).exp()


def compute_m2po_losses(tokens: Tokens, old: Tensor) -> Tensor:
    """Mask the largest d of the tokens that a clip could stop, one by one, until the mean of d^2 is below the cap."""
    d = (tokens.logprobs.detach() - old) * tokens.is_real
    rest = {tuple(place) for place in (tokens.advantages * d > 0).nonzero().tolist()}
    out = torch.zeros_like(tokens.is_real)
    while rest and sum(d[place].item() ** 2 for place in rest) / len(rest) > 0.04:
        largest = max(rest, key=lambda place: abs(d[place].item()))
        rest.remove(largest)
        out[largest] = True
    return compute_importance_losses(tokens, old) * ~out


def compute_topr_losses(tokens: Tokens, old: Tensor) -> Tensor:
    tapered = weigh(tokens.logprobs.detach() - old, tokens.is_real, "sequence").clamp(max=1)
    return -tokens.advantages * torch.where(tokens.advantages > 0, torch.ones_like(old), tapered) * tokens.logprobs


def compute_rec_losses(tokens: Tokens, old: Tensor) -> Tensor:
    """one-side bounds of .2, importance weights."""
    a, ratio = tokens.advantages, (tokens.logprobs.detach() - old).exp()
    is_kept = ((a >= 0) & (ratio <= 1.2)) | ((a <= 0) & (ratio >= 0.8))
    return -a * ratio * is_kept * tokens.logprobs


def compute_sppo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    bound = float(np.log(1.3))
    return -tokens.advantages * (tokens.logprobs - old).clamp(-bound, bound)


def compute_cispo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    return -tokens.advantages * (tokens.logprobs.detach() - old).exp().clamp(0, 1.28) * tokens.logprobs


def compute_gspo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    """The gradient of the sequence ratio per token: -A s log p where it is not clipped."""
    s = mean_rows(tokens.logprobs.detach() - old, tokens.is_real).exp()
    own = s * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return torch.maximum(-tokens.advantages * own, -tokens.advantages * own.clamp(1 - 3e-4, 1 + 4e-4))


def compute_sapo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    tau = torch.where(tokens.advantages > 0, 1.0, torch.full_like(old, 1.05))
    return -tokens.advantages * 4 / tau * torch.sigmoid(tau * ((tokens.logprobs - old).exp() - 1))


def compute_opmd_losses(tokens: Tokens, old: Tensor) -> Tensor:
    return -tokens.advantages * tokens.logprobs / 2


def compute_dppo_losses(tokens: Tokens, old: Tensor, *, is_kl: bool) -> Tensor:
    """A token that moves away from the old policy has no loss if the divergence is above its limit."""
    losses = torch.zeros_like(old)
    for place in tokens.is_real.nonzero().tolist():
        row, time = place
        a, x, q = tokens.advantages[row, time], tokens.logprobs[row, time], old[row, time].exp().item()
        p = x.detach().exp().item()
        divergence, limit = abs(p - q), 0.2
        if is_kl:
            divergence, limit = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)), 0.05
        moves_away = (a > 0 and p > q) or (a < 0 and p < q)
        if not (moves_away and divergence > limit):
            losses[row, time] = -a * (x.exp() / q)
    return losses


def compute_gmpo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    """The gradient of the geometric mean of clipped ratios per token."""
    sign = tokens.advantages.sign()
    signed_ratio = (tokens.logprobs.detach() - old).exp() ** sign
    clipped = torch.minimum(signed_ratio, signed_ratio.clamp(np.exp(-0.4), np.exp(0.4))) ** sign
    s = mean_rows(clipped.log(), tokens.is_real).exp()
    own = (tokens.logprobs - tokens.logprobs.detach()) * (signed_ratio <= np.exp(0.4))
    return -tokens.advantages * s * own.exp()


def compute_luspo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    s = mean_rows(tokens.logprobs.detach() - old, tokens.is_real).exp()
    own = s * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return torch.maximum(-tokens.advantages * own, -tokens.advantages * own.clamp(1 - 2e-3, 1 + 2.5e-3))


def compute_vespo_losses(tokens: Tokens, old: Tensor) -> Tensor:
    w = weigh(tokens.logprobs.detach() - old, tokens.is_real, "sequence")
    weights = torch.where(tokens.advantages >= 0, w**2 * (3 * (1 - w)).exp(), w**3 * (2 * (1 - w)).exp())
    return -tokens.advantages * weights * tokens.logprobs


def find_covariances(tokens: Tokens) -> dict[tuple[int, int], float]:
    """Of each token: (log p - mean)(A - mean)."""
    places = [tuple(place) for place in tokens.is_real.nonzero().tolist()]
    x, a = ([values[place].item() for place in places] for values in (tokens.logprobs.detach(), tokens.advantages))
    mean_x, mean_a = sum(x) / len(x), sum(a) / len(a)
    return {place: (u - mean_x) * (v - mean_a) for place, u, v in zip(places, x, a, strict=True)}


def compute_clip_cov_losses(tokens: Tokens, old: Tensor) -> Tensor:
    """All tokens within the bounds are masked: the fraction is 1."""
    losses = compute_ppo_losses(tokens, old)
    is_kept = torch.ones_like(losses)
    for place, covariance in find_covariances(tokens).items():
        is_kept[place] = not 0.1 <= covariance <= 0.5
    assert 0 < is_kept[tokens.is_real].mean() < 1
    return losses * is_kept


def compute_kl_cov_losses(tokens: Tokens, old: Tensor) -> Tensor:
    """A fifth of the tokens is penalized."""
    covariances = find_covariances(tokens)
    is_penalized = torch.zeros_like(old)
    for place in sorted(covariances, key=covariances.__getitem__)[len(covariances) - int(0.2 * len(covariances)) :]:
        is_penalized[place] = 1.0
    return compute_importance_losses(tokens, old) + 0.7 * is_penalized * (tokens.logprobs - old).abs()


LOSSES = {
    "grpo": (compute_ppo_losses, "token-mean", {}),
    "rloo": (compute_ppo_losses, "seq-mean-token-sum", {}),
    "reinforce": (compute_reinforce_losses, "seq-mean-token-sum", {}),
    "importance_sampling": (compute_importance_losses, "token-mean", {}),
    "m2po": (compute_m2po_losses, "token-mean", {}),
    "topr": (compute_topr_losses, "token-mean", {}),
    "rec": (compute_rec_losses, "token-mean", {"clip_mode": "one-side", "weight": "importance_sampling"}),
    "sppo": (compute_sppo_losses, "token-mean", {}),
    "cispo": (compute_cispo_losses, "token-mean", {}),
    "gspo": (compute_gspo_losses, "seq-mean-token-mean", {}),
    "sapo": (compute_sapo_losses, "seq-mean-token-mean", {}),
    "opmd": (compute_opmd_losses, "token-mean", {}),
    "dppo_tv": (partial(compute_dppo_losses, is_kl=False), "seq-mean-token-sum", {}),
    "dppo_kl": (partial(compute_dppo_losses, is_kl=True), "seq-mean-token-sum", {}),
    "gmpo": (compute_gmpo_losses, "seq-mean-token-mean", {}),
    "luspo": (compute_luspo_losses, "seq-mean-token-sum", {}),
    "vespo": (compute_vespo_losses, "seq-mean-token-sum", {}),
    "clip_cov": (compute_clip_cov_losses, "token-mean", {}),
    "kl_cov": (compute_kl_cov_losses, "token-mean", {"penalty_coef": 0.7}),
}
"""By name of the algorithm: the loss of each token, the aggregation, and the arguments of the loss function."""
TERMS_ARGS = {
    "clip_cov": {"fraction": 1.0, "covariance_low": 0.1, "covariance_high": 0.5},
    "kl_cov": {"fraction": 0.2},
}
"""By name of the algorithm: arguments of the function over all tokens."""


def list_updates() -> list[str]:
    """Algorithms that compute different things from given advantages: one of those that differ in advantages alone."""
    found: list[tuple[AlgorithmEntry, bool, str]] = []
    for name, entry in ALGORITHMS.items():
        update = replace(
            entry, compute_advantages=None, is_group_relative=True, drops_equal_rewards=True, reads_tokens=False
        )
        is_supervised = entry.compute_advantages is None
        if (update, is_supervised) not in [each[:2] for each in found]:
            found.append((update, is_supervised, name))
    return [name for *_, name in found]


UPDATES = list_updates()
