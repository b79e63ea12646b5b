"""Group-relative advantages: the reward of a rollout against the rewards of the other rollouts of its task.

Pure functions of rewards. A rollout without a reward is excluded from all statistics and gets None. A group whose
scored rollouts have identical rewards, or with a single scored rollout, has zero advantage: its rollouts get None, and
the caller drops and counts the group.

GDPO reads several rewards of a rollout: the metrics that the judge reports beside the reward.

GiGPO has one advantage per turn, A = A_E + omega A_S (Feng et al., 2025, "Group-in-group policy optimization", eqs. 3,
7 and 8). A_E compares the rollout's return with those of the other rollouts of its task. A_S compares the discounted
return from this turn on with those of all turns, of rollouts of the same task, in the same state (the anchor state).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from tunesmith.errors import ConfigError
from tunesmith.types import RunAdvantage, are_equal, is_above, is_at_least

Advantages = Sequence[Sequence[RunAdvantage]]
"""For each rollout of each group: one number, one number per turn, or None (not trained)."""
Share = Annotated[float, Field(ge=0, le=1)]
V = TypeVar("V")
DEFAULT_K = 4
"""Of pass@k."""
MIN_VARIANCE = 1e-4
"""Success rates of smaller variance are treated as equal: a Beta distribution fitted to them is almost a point mass."""
MIN_DENSITY = 1e-3
"""Lower bound of the density that bnpo divides by: without it, one task far from all others outweighs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The inputs of advantage functions for one rollout."""

    reward: float | None
    num_turns: int
    """Model calls of the rollout."""
    turn_prompts: tuple[tuple[int, ...], ...] = ()
    """Prompt token ids of each turn."""
    turn_logprobs: tuple[tuple[float, ...], ...] = ()
    """Logprobs of the tokens sampled in each turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    baseline_reward: float | None = None
    """Reward of the task's greedy rollout; None if there was none."""


def compute_grpo_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    epsilon: PositiveFloat = 1e-6,
    std_cal_level: Literal["group", "batch"] = "group",
    std_threshold: NonNegativeFloat = 0.0,
    rank_penalty: Share = 0.0,
) -> Advantages:
    """(R - mean) / (std + epsilon), each model call counted as one observation (Shao et al., 2024, section 4.1).

    A rollout of many calls therefore weighs more in mean and std; `compute_multi_step_grpo_advantages` counts rollouts.
    The std is the sample std (ddof 1); `std_cal_level="batch"` computes it over all groups. A group whose own std is at
    most `std_threshold` is dropped. `rank_penalty` lowers the rewards of likely rollouts first, see
    `apply_rank_penalty`.
    """
    if rank_penalty:
        groups = [apply_rank_penalty(group, rank_penalty) for group in groups]
    return _compute_advantages(groups, lambda run: run.num_turns, epsilon, std_cal_level, std_threshold)


def compute_multi_step_grpo_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    epsilon: PositiveFloat = 1e-6,
    enable_step_norm: bool = False,
    std_cal_level: Literal["group", "batch"] = "group",
    std_threshold: NonNegativeFloat = 0.0,
) -> Advantages:
    """As GRPO with each rollout counted once, independent of its number of model calls.

    `enable_step_norm` divides a rollout's advantage by its number of model calls, so that with token-mean aggregation
    rollouts of many calls do not dominate the loss.
    """
    advantages = _compute_advantages(groups, lambda run: 1, epsilon, std_cal_level, std_threshold)
    if not enable_step_norm:
        return advantages
    return [
        [None if value is None else value / max(run.num_turns, 1) for run, value in zip(group, row, strict=True)]
        for group, row in zip(groups, advantages, strict=True)
    ]


def compute_dr_grpo_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """R - mean, not divided by the std, which would give more weight to very easy and very hard tasks.

    Liu et al. (2025), "Understanding R1-Zero-like training", section 3.2. The paper's second change is the aggregation
    (`seq-mean-token-sum-norm`).
    """
    return map_groups(groups, subtract_mean)


def compute_maxrl_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """(R - mean) / mean with the group's mean reward (Tajwar et al., 2026, "Maximum likelihood RL", MaxRL).

    The fewer rollouts of a task succeed, the larger the weight of each success. With rewards of 0 and 1, sums of token
    losses and n rollouts, the expected gradient is that of log p, p the success rate, truncated after order n - 1:
    -sum over k < n of (1 - p)^k / k; REINFORCE has the first order only. Without a success the advantage is zero; the
    paper's estimator of order n keeps the baseline there. Rewards must not be negative.
    """
    lowest = min((run.reward for group in groups for run in group if run.reward is not None), default=0.0)
    if is_above(0.0, lowest):
        raise ConfigError(
            f"algorithm_type='maxrl' divides by the mean reward and needs rewards of at least 0, got {lowest:g}: shift "
            "them in the judge, or choose grpo"
        )

    def normalize(rewards: list[float]) -> list[float]:
        mean = math.fsum(rewards) / len(rewards)
        return [(reward - mean) / mean for reward in rewards]

    return map_groups(groups, normalize)


def compute_batch_normalized_advantages(
    groups: Sequence[Sequence[RunOutcome]], *, epsilon: PositiveFloat = 1e-6
) -> Advantages:
    """(R - mean of the group) / (std + epsilon), with the std of R - mean over all rollouts of the step.

    REINFORCE++ with baseline (Hu et al., 2025). The group's own std, as in GRPO, would give more weight to very easy
    and very hard tasks, and depends on the rollout that it scales. Groups with equal rewards are part of the std; their
    advantage is zero. The paper also subtracts the mean of R - mean over the batch, which is zero. Each rollout counts
    once (verl and OpenRLHF count each token, so long rollouts weigh more).
    """
    return normalize_over_batch(map_groups(groups, subtract_mean), groups, epsilon=epsilon)


def normalize_over_batch(
    advantages: Sequence[Sequence[float | None]], groups: Sequence[Sequence[RunOutcome]], *, epsilon: float
) -> Advantages:
    """Centered advantages divided by their sample std over all scored rollouts; None counts as 0 and stays None."""
    values = [
        value or 0.0
        for row, group in zip(advantages, groups, strict=True)
        for value, run in zip(row, group, strict=True)
        if run.reward is not None
    ]
    scale = compute_std(values) + epsilon
    return [[None if value is None else value / scale for value in row] for row in advantages]


def compute_bnpo_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """(R - p) / f(p) with p the group's mean reward and f a Beta density fitted to the batch (Xiao et al., 2025, BNPO).

    If p is distributed as Beta(a, b) over tasks, f = Beta(1 + a/3, 1 + b/3) minimizes the variance of the gradient; a
    and b are fitted to the mean and variance of p over the batch's groups (method of moments). Where no Beta
    distribution has these, f is 1, as in REINFORCE with a baseline. f is at least 1e-3, so that advantages stay below
    1000. Rewards must be in [0, 1].
    """
    scored = [[run.reward for run in group if run.reward is not None] for group in groups]
    rewards = [reward for row in scored for reward in row]
    if rewards and (is_above(0.0, min(rewards)) or is_above(max(rewards), 1.0)):
        raise ConfigError(
            f"algorithm_type='bnpo' needs rewards from 0 to 1, got {min(rewards):g} to {max(rewards):g}: scale them "
            "in the judge, or choose grpo"
        )
    a, b = fit_beta([math.fsum(row) / len(row) for row in scored if row])

    def normalize(rewards: list[float]) -> list[float]:
        density = compute_beta_density(math.fsum(rewards) / len(rewards), 1 + a / 3, 1 + b / 3)
        density = max(density, MIN_DENSITY)
        return [value / density for value in subtract_mean(rewards)]

    return map_groups(groups, normalize)


def compute_pass_at_k_advantages(
    groups: Sequence[Sequence[RunOutcome]], *, k: PositiveInt = DEFAULT_K, min_reward: float = 1.0
) -> Advantages:
    """The mean advantage of a rollout over all subsets of k rollouts that contain it.

    Chen et al. (2025), "Pass@k training for adaptively balancing exploration and exploitation". The reward of a subset
    is 1 if one of its rollouts succeeded, with a reward of at least `min_reward`; its advantage is
    (reward - P) / sqrt(P (1 - P)), where P is the mean over all subsets. In closed form (the paper's analytical
    derivation), with n scored rollouts of which f failed, P = 1 - C(f, k) / C(n, k), a success gets (1 - P) / std and a
    failure (1 - P - C(f - 1, k - 1) / C(n - 1, k - 1)) / std. A group is dropped if all subsets have the same reward:
    no success, fewer than k failures, or no more than k scored rollouts. With k = 1 this is GRPO with the population
    std.
    """

    def average_over_subsets(rewards: list[float]) -> list[float] | None:
        has_failed = [not is_at_least(reward, min_reward) for reward in rewards]
        n, f = len(rewards), sum(has_failed)
        if f in (0, n) or not k <= f:
            return None
        mean = 1 - math.comb(f, k) / math.comb(n, k)
        std = math.sqrt(mean * (1 - mean))
        failed = (1 - mean - math.comb(f - 1, k - 1) / math.comb(n - 1, k - 1)) / std
        return [failed if is_failure else (1 - mean) / std for is_failure in has_failed]

    return map_groups(groups, average_over_subsets)


def map_groups(
    groups: Sequence[Sequence[RunOutcome]], compute: Callable[[list[float]], list[float] | None]
) -> list[list[float | None]]:
    """Apply `compute` to each group's scored rewards; None, or rewards that do not differ, drop the group."""
    advantages: list[list[float | None]] = []
    for group in groups:
        rewards = [run.reward for run in group if run.reward is not None]
        values = None if are_equal(rewards) else compute(rewards)
        advantages.append([None] * len(group) if values is None else spread_scored(group, values))
    return advantages


def spread_scored(group: Sequence[RunOutcome], values: Sequence[V]) -> list[V | None]:
    """The values of the scored rollouts, None for the others."""
    remaining = iter(values)
    return [None if run.reward is None else next(remaining) for run in group]


def apply_rank_penalty(group: Sequence[RunOutcome], penalty: float) -> list[RunOutcome]:
    """The group with rewards R (1 - penalty * k / G); k of its G rollouts are at most as likely as the rollout.

    He et al. (2025), "Rewarding the unlikely", section 4.1: unlikely correct rollouts gain relative to likely correct
    rollouts. The likelihood of a rollout is the mean logprob of its sampled tokens.
    """
    likelihoods = [
        math.fsum(map(math.fsum, run.turn_logprobs)) / max(sum(map(len, run.turn_logprobs)), 1) for run in group
    ]
    scored = [value for value, run in zip(likelihoods, group, strict=True) if run.reward is not None]
    return [
        run
        if run.reward is None
        else replace(run, reward=run.reward * (1 - penalty * sum(other <= own for other in scored) / len(scored)))
        for own, run in zip(likelihoods, group, strict=True)
    ]


def fit_beta(values: Sequence[float]) -> tuple[float, float]:
    """Parameters of the Beta distribution with the mean and variance of the values; (0, 0) if there is none."""
    if len(values) < 2:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    if variance < MIN_VARIANCE or variance >= mean * (1 - mean):
        return 0.0, 0.0
    size = mean * (1 - mean) / variance - 1
    return size * mean, size * (1 - mean)


def compute_beta_density(x: float, alpha: float, beta: float) -> float:
    """The density of Beta(alpha, beta) at x, inside (0, 1)."""
    log_norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    return math.exp((alpha - 1) * math.log(x) + (beta - 1) * math.log(1 - x) - log_norm)


def subtract_mean(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def standardize(values: Sequence[float], *, epsilon: float, ddof: int = 1) -> list[float]:
    """(x - mean) / (std + epsilon)."""
    scale = compute_std(values, ddof=ddof) + epsilon
    return [value / scale for value in subtract_mean(values)]


def compute_std(values: Sequence[float], *, ddof: int = 1) -> float:
    """The standard deviation; 0 where it is not defined."""
    if len(values) <= ddof:
        return 0.0
    return math.sqrt(math.fsum(value**2 for value in subtract_mean(values)) / (len(values) - ddof))


def _compute_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    count: Callable[[RunOutcome], int],
    epsilon: float,
    std_cal_level: str,
    std_threshold: float,
) -> list[list[float | None]]:
    """GRPO's advantages, with `count` observations of each rollout's reward in mean and std."""
    observed = [[run.reward for run in group if run.reward is not None for _ in range(count(run))] for group in groups]
    batch_std = compute_std([reward for rewards in observed for reward in rewards])
    advantages: list[list[float | None]] = []
    for group, rewards in zip(groups, observed, strict=True):
        std = compute_std(rewards)
        if are_equal(rewards) or std <= std_threshold:
            advantages.append([None] * len(group))
        else:
            mean = math.fsum(rewards) / len(rewards)
            scale = (batch_std if std_cal_level == "batch" else std) + epsilon
            advantages.append([None if run.reward is None else (run.reward - mean) / scale for run in group])
    return advantages


def compute_gdpo_advantages(
    groups: Sequence[Sequence[RunOutcome]], *, rewards: dict[str, float] | None = None, epsilon: PositiveFloat = 1e-6
) -> Advantages:
    """Each reward normalized within the group, then their weighted sum over the batch (Liu et al., 2026, GDPO).

    `rewards` maps names of metrics to weights. A rollout has w_1 A_1 + ... + w_m A_m with A_j = (r_j - mean) /
    (std + epsilon) over the group, divided by the std + epsilon of this sum over all rollouts of the step. GRPO on the
    weighted sum of rewards gives rollouts with different rewards but equal sums the same advantage, and lets the reward
    of largest variance dominate. Stds are sample stds (ddof 1), as in TRL (`normalize_then_sum`) and verl, which
    computes that of the batch over tokens. A group in which no reward differs is dropped. Rollouts without a reward are
    excluded; one with a reward but without a named metric is an error.
    """
    if rewards is None:
        if not groups:
            return []
        raise ConfigError(f"algorithm_type='gdpo' needs {NEEDED_REWARDS}")
    if not rewards or not all(math.isfinite(weight) and weight != 0 for weight in rewards.values()):
        raise ConfigError(f"rewards={rewards} of 'gdpo' must name metrics with finite weights other than 0")
    rows: list[list[float | None]] = [[0.0 if run.reward is not None else None for run in group] for group in groups]
    for name, weight in rewards.items():
        parts = [[_read_part(run, name) for run in group] for group in groups]
        normalized = map_groups(parts, lambda values: standardize(values, epsilon=epsilon))
        for row, added in zip(rows, normalized, strict=True):
            row[:] = [
                None if total is None else total + weight * (value or 0.0)
                for total, value in zip(row, added, strict=True)
            ]
    rows = [[None] * len(row) if are_equal([value for value in row if value is not None]) else row for row in rows]
    return normalize_over_batch(rows, groups, epsilon=epsilon)


NEEDED_REWARDS = (
    "algorithm.advantage_args.rewards: the metrics of the judge that are rewards, with their weights, such as "
    "{accuracy: 1.0, format: 0.5}"
)


def _read_part(run: RunOutcome, name: str) -> RunOutcome:
    """The rollout with the metric as its reward; None stays None."""
    if run.reward is None:
        return run
    if name not in run.metrics:
        raise ConfigError(
            f"advantage_args.rewards of 'gdpo' names {name!r}, but the judge scored a rollout without that metric (it "
            f"has {', '.join(run.metrics) or 'none'}): report it in JudgeOutput.metrics of every scored rollout, or "
            "name another metric"
        )
    return RunOutcome(reward=float(run.metrics[name]), num_turns=run.num_turns)


def compute_gigpo_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    omega: NonNegativeFloat = 1.0,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95,
    fnorm: Literal["std", "none"] = "none",
    epsilon: PositiveFloat = 1e-6,
    step_reward_key: str | None = None,
    env_state_hash_key: str | None = None,
) -> Advantages:
    """One advantage per turn; a group in which all of them are 0 is dropped.

    `fnorm="std"` divides both parts by the standard deviation of the values compared. Without `step_reward_key` the
    rollout's reward is that of its last turn; with it, the reward of turn t is the rollout's metric
    `<step_reward_key>/<t>`, 0 if not reported, and their sum replaces the rollout's reward. Without
    `env_state_hash_key` two turns are in the same state if their prompts have the same token ids; with it, if their
    metrics `<env_state_hash_key>/<t>` are equal.
    """
    advantages: list[list[RunAdvantage]] = []
    for group in groups:
        runs = [run for run in group if run.reward is not None]
        rewards = [_list_rewards(run, step_reward_key) for run in runs]
        states = [_list_states(run, env_state_hash_key) for run in runs]
        totals = [math.fsum(each) for each in rewards] if step_reward_key else [run.reward or 0.0 for run in runs]
        run_advantages = _normalize(totals, fnorm, epsilon)
        turn_advantages = _compute_turn_advantages([_discount(each, gamma) for each in rewards], states, fnorm, epsilon)
        rows = [
            tuple(of_run + omega * of_turn for of_turn in turns)
            for of_run, turns in zip(run_advantages, turn_advantages, strict=True)
        ]
        has_nonzero = any(value for row in rows for value in row)
        advantages.append(list(spread_scored(group, rows)) if has_nonzero else [None] * len(group))
    return advantages


def _list_rewards(run: RunOutcome, key: str | None) -> list[float]:
    assert run.reward is not None
    if key is not None:
        return [run.metrics.get(f"{key}/{turn}", 0.0) for turn in range(run.num_turns)]
    return [0.0] * (run.num_turns - 1) + [run.reward] * min(run.num_turns, 1)


def _list_states(run: RunOutcome, key: str | None) -> list[Hashable]:
    if key is None:
        return list(run.turn_prompts)
    names = [f"{key}/{turn}" for turn in range(run.num_turns)]
    missing = [name for name in names if name not in run.metrics]
    if missing:
        raise ConfigError(
            f"env_state_hash_key={key!r}: a rollout does not report the metric {missing[0]!r}; report it for every "
            "model call, or leave env_state_hash_key out to compare prompts"
        )
    return [run.metrics[name] for name in names]


def _discount(rewards: Sequence[float], gamma: float) -> list[float]:
    """R_t = r_t + gamma R_{t+1}."""
    return list(accumulate(reversed(rewards), lambda following, reward: reward + gamma * following))[::-1]


def _compute_turn_advantages(
    returns: Sequence[Sequence[float]], states: Sequence[Sequence[Hashable]], fnorm: str, epsilon: float
) -> list[list[float]]:
    """Each turn's return relative to those of all turns in its state; 0 if it is the only one."""
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for run, of_run in enumerate(states):
        for turn, state in enumerate(of_run):
            members.setdefault(state, []).append((run, turn))
    compared = [[0.0] * len(of_run) for of_run in returns]
    for places in members.values():
        values = _normalize([returns[run][turn] for run, turn in places], fnorm, epsilon)
        for (run, turn), value in zip(places, values, strict=True):
            compared[run][turn] = value
    return compared


def _normalize(values: Sequence[float], fnorm: str, epsilon: float) -> list[float]:
    """(x - mean) / (scale + epsilon), scale the sample std or 1; exact zeros if all values are equal."""
    if are_equal(values):
        return [0.0] * len(values)
    if fnorm == "std":
        return standardize(values, epsilon=epsilon)
    return [value / (1.0 + epsilon) for value in subtract_mean(values)]
