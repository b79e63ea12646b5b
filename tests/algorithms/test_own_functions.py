"""Own advantage and loss functions: every built-in one satisfies the contract, and each way to break it is named."""

from __future__ import annotations

import pytest
import torch

from tunesmith.algorithms.advantages.group import RunOutcome, compute_grpo_advantages
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.losses.policy import compute_ppo_clip_losses
from tunesmith.algorithms.scores import TokenLosses
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError

REWARDED = sorted(name for name, entry in ALGORITHMS.items() if entry.compute_advantages is not None)


def resolve(*, advantage=None, loss=None, **settings):
    given = {"advantage": advantage, "loss": loss}
    named = {name: f"my.py:{name}" for name, function in given.items() if function is not None}
    section = AlgorithmSection(**{"algorithm_type": "grpo"} | settings | named)
    return resolve_algorithm(section, functions={f"algorithm.{name}": given[name] for name in named})


def build_outcomes(*rewards):
    return [[RunOutcome(reward=reward, num_turns=2) for reward in group] for group in rewards]


@pytest.mark.parametrize("name", REWARDED)
def test_every_loss_of_the_table_satisfies_the_contract(name):
    entry = ALGORITHMS[name]
    algorithm = resolve(loss=entry.compute_losses, algorithm_type=name, loss_args=dict(entry.loss_args))
    built_in = resolve_algorithm(AlgorithmSection(algorithm_type=name))
    assert (algorithm.aggregation, algorithm.needs) == (built_in.aggregation, built_in.needs)
    assert algorithm.entry.is_on_policy == built_in.entry.is_on_policy


def test_defaults_of_the_replaced_loss_do_not_reach_the_own_one():
    seen = {}

    def loss(scores, *, clip_range_high=0.2):
        seen["high"] = clip_range_high
        return compute_ppo_clip_losses(scores, clip_range_high=clip_range_high)

    resolve(loss=loss, algorithm_type="dapo")
    assert seen == {"high": 0.2}
    resolve(loss=loss, algorithm_type="dapo", loss_args={"clip_range_high": 0.5})
    assert seen == {"high": 0.5}
    with pytest.raises(ConfigError, match=r"unknown argument 'clip_hi' in loss_args of 'my.py:loss'"):
        resolve(loss=loss, loss_args={"clip_hi": 0.5})


def detached(scores):
    return TokenLosses(losses_N=-scores.advantages_N * scores.logprobs_N.detach())


def mean_of_tokens(scores):
    return TokenLosses(losses_N=-scores.advantages_N * scores.logprobs_N / len(scores.logprobs_N))


def whitened(scores):
    advantages_N = scores.advantages_N - scores.advantages_N.mean()
    return TokenLosses(losses_N=-advantages_N * scores.logprobs_N)


def mixed_gradient(scores):
    shift_N = scores.logprobs_N.flip(0)
    return TokenLosses(losses_N=-2 * scores.logprobs_N + shift_N - shift_N.detach())


def in_place(scores):
    scores.advantages_N.mul_(2)
    return TokenLosses(losses_N=-scores.advantages_N * scores.logprobs_N)


def random(scores):
    return TokenLosses(losses_N=-torch.rand_like(scores.logprobs_N) * scores.logprobs_N)


def reads_sequence_ratios(scores):
    return TokenLosses(losses_N=-scores.logprobs_N * scores.sequence_log_ratios_N.exp())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda scores: -scores.logprobs_N, r"must return TokenLosses\(.*got Tensor"),
        (
            lambda scores: TokenLosses(losses_N=-scores.logprobs_N.sum()),
            r"losses_N must have one value per token",
        ),
        (lambda scores: TokenLosses(losses_N=-scores.logprobs_N.float()), "must have the dtype of logprobs_N"),
        (lambda scores: TokenLosses(losses_N=(scores.logprobs_N - 9).log()), "losses_N is not finite"),
        (lambda scores: TokenLosses(losses_N=(scores.logprobs_N * 0).sqrt()), "the gradient .* is not finite"),
        (lambda scores: TokenLosses(losses_N=scores.logprobs_N * 0), "no gradient by scores.logprobs_N"),
        (detached, "no gradient by scores.logprobs_N"),
        (mean_of_tokens, "the loss of a token depends on the other tokens"),
        (whitened, "the loss of a token depends on the other tokens"),
        (mixed_gradient, "the (loss|gradient) of a token depends on the other tokens"),
        (in_place, "changes its inputs in place"),
        (random, "returns other losses for the same scores"),
        (reads_sequence_ratios, r"with algorithm_type='grpo' these scores are None: sequence_log_ratios_N.*as gspo"),
        (
            lambda scores: TokenLosses(losses_N=-scores.logprobs_N, metrics={"kl": scores.old_logprobs_N}),
            "the metric 'kl' is reported by the trainer",
        ),
        (
            lambda scores: TokenLosses(losses_N=-scores.logprobs_N, metrics={"relative_update": scores.old_logprobs_N}),
            "the metric 'relative_update' is reported by the trainer",
        ),
        (
            lambda scores: TokenLosses(losses_N=-scores.logprobs_N, metrics={"p": scores.logprobs_N}),
            "metric 'p' has a gradient",
        ),
        (lambda scores: scores.nothing, r"raised AttributeError.*test_own_functions.py:\d+"),
        (lambda scores, clip: None, r"must take one positional argument.*\(scores, clip\)"),
        (lambda scores, **rest: None, "must take one positional argument"),
    ],
)
def test_a_broken_loss_is_refused_with_its_reason(loss, message):
    with pytest.raises(ConfigError, match=rf"algorithm.loss='my.py:loss'.*{message}"):
        resolve(loss=loss)


def test_sequence_ratios_come_with_an_algorithm_that_computes_them():
    assert "logprobs" in resolve(loss=reads_sequence_ratios, algorithm_type="gspo").needs


def test_metrics_may_be_of_any_dtype():
    def loss(scores):
        metrics = {"is_up": scores.advantages_N > 0, "low": scores.old_logprobs_N.float()}
        return TokenLosses(losses_N=-scores.advantages_N * scores.logprobs_N, metrics=metrics)

    resolve(loss=loss)


def test_detached_weights_are_constants_of_the_loss():
    def loss(scores):
        with torch.no_grad():
            weights_N = (scores.logprobs_N - scores.old_logprobs_N).exp()
        return TokenLosses(losses_N=-scores.advantages_N * weights_N * scores.logprobs_N * scores.logprobs_N.data.exp())

    resolve(loss=loss)


async def wait_for_scores(scores):
    return None


def test_an_async_function_is_refused():
    with pytest.raises(ConfigError, match="must be an ordinary function"):
        resolve(loss=wait_for_scores)


def test_own_grpo_gives_the_advantages_of_grpo():
    groups = build_outcomes([0.0, 1.0, None, 3.0], [None, None], [2.0, 2.0], [1.0, 0.5])
    expected = resolve_algorithm(AlgorithmSection(algorithm_type="grpo")).compute_advantages(groups)
    assert resolve(advantage=compute_grpo_advantages).compute_advantages(groups) == expected


def test_an_own_advantage_function_sees_scored_rollouts_only():
    seen = []

    def advantage(groups):
        seen.append([[run.reward for run in group] for group in groups])
        return [[run.reward for run in group] for group in groups]

    compute = resolve(advantage=advantage).compute_advantages
    assert compute(build_outcomes([None, 1.0], [None], [])) == [[None, 1.0], [None], []]
    assert seen[0] == [[1.0]]
    assert compute([]) == []


def test_an_own_advantage_function_may_give_one_number_per_turn_and_be_of_one_rollout():
    def advantage(groups, *, scale: float):
        return [[(scale, 0.0) for _ in group] for group in groups]

    algorithm = resolve(advantage=advantage, advantage_args={"scale": 2.0}, group_size=1)
    assert algorithm.compute_advantages(build_outcomes([1.0])) == [[(2.0, 0.0)]]
    with pytest.raises(ConfigError, match=r"advantage_args of 'my.py:advantage' needs the argument 'scale'"):
        resolve(advantage=advantage)


def center_on_first(groups):
    return [[run.reward - group[0].reward for run in group] for group in groups]


def center_on_first_group(groups):
    return [[run.reward - groups[0][0].reward for run in sorted(group, key=id)] for group in groups]


def clear_groups(groups):
    values = [[run.reward for run in group] for group in groups]
    for group in groups:
        for run in group:
            run.metrics["seen"] = 1.0
    return values


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda groups: 1.0, "must return one list per group, 2 in all, got float"),
        (lambda groups: [[1.0, 2.0]], "must return one list per group, 2 in all, got list of length 1"),
        (lambda groups: [[1.0] for _ in groups], "must return one value per rollout, 2 for this group"),
        (lambda groups: [["x" for _ in group] for group in groups], "must return numbers, tuples of numbers or None"),
        (lambda groups: [[float("nan") for _ in group] for group in groups], "returned nan: advantages must be finite"),
        (
            lambda groups: [[(1.0,) for _ in group] for group in groups],
            "returned 1 advantages for a rollout of 2",
        ),
        (lambda groups: [[run.metrics["x"] for run in group] for group in groups], r"raised KeyError: 'x' \(.*:\d+"),
        (center_on_first, "depends on the order of the rollouts within a group"),
        (center_on_first_group, "depends on the order of the groups"),
        (lambda groups, calls=None: None, "must take one positional argument"),
        (clear_groups, "changed its argument"),
    ],
)
def test_a_broken_advantage_function_is_refused_with_its_reason(advantage, message):
    with pytest.raises(ConfigError, match=rf"algorithm.advantage='my.py:advantage'.*{message}"):
        resolve(advantage=advantage).compute_advantages(build_outcomes([0.0, 1.0], [3.0, 5.0]))


def test_an_advantage_function_with_state_is_refused():
    calls = []

    def advantage(groups):
        calls.append(1)
        return [[float(len(calls)) for _ in group] for group in groups]

    with pytest.raises(ConfigError, match="returned other values for the same groups"):
        resolve(advantage=advantage).compute_advantages(build_outcomes([0.0, 1.0]))


def test_the_order_of_groups_is_checked_once_there_are_several():
    compute = resolve(advantage=center_on_first_group).compute_advantages
    compute(build_outcomes([1.0]))
    with pytest.raises(ConfigError, match="depends on the order of the groups"):
        compute(build_outcomes([1.0], [2.0]))


@pytest.mark.parametrize("knob", ["advantage", "loss"])
def test_algorithms_on_given_completions_take_no_own_function(knob):
    with pytest.raises(ConfigError, match=rf"algorithm.{knob}='my.py:{knob}' has no effect with algorithm_type='sft'"):
        resolve(algorithm_type="sft", **{knob: compute_ppo_clip_losses})


def test_an_own_advantage_has_no_subsets_of_k_rollouts():
    algorithm = resolve(advantage=compute_grpo_advantages, algorithm_type="pass_at_k", group_size=2)
    assert algorithm.compute_advantages(build_outcomes([0.0, 1.0])) is not None
