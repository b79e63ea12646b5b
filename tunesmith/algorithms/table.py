"""The table of algorithms by name.

An entry combines an advantage function, a function over all tokens of the update (`compute_terms`) and a loss function.
Users set the keyword arguments of these functions, whose types, ranges and defaults are in their signatures;
`algorithm.resolve_algorithm` refuses all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tunesmith.algorithms import sequence_terms
from tunesmith.algorithms.advantages import baselines, group, returns
from tunesmith.algorithms.advantages.group import Advantages
from tunesmith.algorithms.losses import policy, preference
from tunesmith.algorithms.scores import Aggregation, Need, TokenInputs, TokenLosses, keep_advantages


def find_reward_kl_needs(args: Mapping[str, Any]) -> frozenset[Need]:
    """A KL in the reward needs the reference."""
    return frozenset({"reference"}) if args.get("reward_kl_coef", 0) > 0 else frozenset()


def find_rec_needs(args: Mapping[str, Any]) -> frozenset[Need]:
    """Sequence ratios need the policy's logprobs from the scoring pass."""
    has_sequences = args.get("clip_mode") == "gspo-one-side" or args.get("weight") == "gspo_importance_sampling"
    return frozenset({"logprobs"}) if has_sequences else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmEntry:
    """One algorithm of the table."""

    compute_advantages: Callable[..., Advantages] | None = group.compute_grpo_advantages
    """None for algorithms that train on given completions, without rewards."""
    compute_losses: Callable[..., TokenLosses] = policy.compute_ppo_clip_losses
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the algorithm that differ from those of the loss function."""
    aggregation: Aggregation = "token-mean"
    compute_terms: Callable[..., TokenInputs] = keep_advantages
    """Function of all tokens of an update, run between advantages and losses."""
    needs: frozenset[Need] = frozenset()
    """Inputs required besides rewards."""
    find_needs: Callable[[Mapping[str, Any]], frozenset[Need]] = find_reward_kl_needs
    """Further needs, from the arguments that the user or the table sets."""
    is_on_policy: bool = True
    """Whether it assumes on-policy data: older data then gets truncated importance weights by default."""
    needs_current_weights: bool = False
    """Whether it is defined for tokens of the current weights only: the baselines of opo and remax are those of the
    policy that is trained, and distillation compares the current policy with its teacher on its own tokens."""
    is_group_relative: bool = True
    """Whether advantages only compare the rollouts of a group, so that a group of one has none."""
    drops_equal_rewards: bool = True
    """Whether a group has zero advantage, and is dropped, if its rewards (and its baseline or turns) do not differ."""
    reads_tokens: bool = False
    """Whether advantages depend on tokens or logprobs, not on rewards, metrics and numbers of turns alone; those of
    grpo do with a rank penalty."""
    needs_sequences: bool = False
    """Whether `compute_terms` combines the tokens of a rollout, so that a turn that branching rollouts share must be
    trained in each of them."""


GSPO = AlgorithmEntry(
    compute_terms=sequence_terms.compute_sequence_ratio_terms,
    compute_losses=policy.compute_gspo_losses,
    needs=frozenset({"logprobs"}),
    aggregation="seq-mean-token-mean",
    needs_sequences=True,
)
DPPO = AlgorithmEntry(
    compute_advantages=group.compute_dr_grpo_advantages, aggregation="seq-mean-token-sum-norm", is_on_policy=False
)
RETURNS = AlgorithmEntry(
    compute_advantages=baselines.keep_rewards, is_group_relative=False, drops_equal_rewards=False, needs_sequences=True
)
DISTILLATION = replace(RETURNS, needs=frozenset({"teacher"}), needs_current_weights=True, needs_sequences=False)
PREFERENCE = AlgorithmEntry(
    compute_advantages=None,
    compute_losses=preference.compute_preference_losses,
    needs=frozenset({"logprobs"}),
    aggregation="sum",
    needs_sequences=True,
)
"""What the algorithms of a family share."""

ALGORITHMS: dict[str, AlgorithmEntry] = {
    "grpo": AlgorithmEntry(),
    "multi_step_grpo": AlgorithmEntry(compute_advantages=group.compute_multi_step_grpo_advantages),
    "dr_grpo": AlgorithmEntry(
        compute_advantages=group.compute_dr_grpo_advantages, aggregation="seq-mean-token-sum-norm"
    ),
    "dapo": AlgorithmEntry(loss_args={"clip_range_high": 0.28}),
    "bnpo": AlgorithmEntry(compute_advantages=group.compute_bnpo_advantages),
    "maxrl": AlgorithmEntry(compute_advantages=group.compute_maxrl_advantages, aggregation="seq-mean-token-sum"),
    "pass_at_k": AlgorithmEntry(compute_advantages=group.compute_pass_at_k_advantages),
    "gdpo": AlgorithmEntry(compute_advantages=group.compute_gdpo_advantages, needs=frozenset({"reward_parts"})),
    "gigpo": AlgorithmEntry(
        compute_advantages=group.compute_gigpo_advantages, is_group_relative=False, reads_tokens=True
    ),
    "rloo": AlgorithmEntry(
        compute_advantages=baselines.compute_rloo_advantages,
        compute_terms=sequence_terms.compute_rloo_terms,
        aggregation="seq-mean-token-sum",
        needs_sequences=True,
    ),
    "reinforce": AlgorithmEntry(
        compute_advantages=baselines.compute_reinforce_advantages,
        compute_losses=policy.compute_reinforce_losses,
        aggregation="seq-mean-token-sum",
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "opo": AlgorithmEntry(
        compute_advantages=baselines.compute_opo_advantages,
        compute_losses=policy.compute_reinforce_losses,
        aggregation="seq-mean-token-sum",
        needs_current_weights=True,
        reads_tokens=True,
    ),
    "cispo": AlgorithmEntry(compute_losses=policy.compute_cispo_losses),
    "gspo": GSPO,
    "sapo": AlgorithmEntry(compute_losses=policy.compute_sapo_losses, aggregation="seq-mean-token-mean"),
    "sppo": AlgorithmEntry(
        compute_advantages=baselines.compute_opmd_advantages, compute_losses=policy.compute_sppo_losses
    ),
    "importance_sampling": AlgorithmEntry(compute_losses=policy.compute_importance_sampling_losses, is_on_policy=False),
    "m2po": AlgorithmEntry(
        compute_terms=sequence_terms.compute_m2po_terms,
        compute_losses=policy.compute_importance_sampling_losses,
        needs=frozenset({"logprobs"}),
        is_on_policy=False,
    ),
    "opmd": AlgorithmEntry(
        compute_advantages=baselines.compute_opmd_advantages,
        compute_losses=policy.compute_opmd_losses,
        is_on_policy=False,
    ),
    "asymre": AlgorithmEntry(
        compute_advantages=baselines.compute_asymre_advantages,
        compute_losses=policy.compute_opmd_losses,
        loss_args={"tau": 0.0},
        is_on_policy=False,
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "topr": AlgorithmEntry(
        compute_advantages=baselines.compute_reinforce_advantages,
        compute_terms=sequence_terms.compute_topr_terms,
        compute_losses=policy.compute_reinforce_losses,
        loss_args={"ratio_cap": None},
        needs=frozenset({"logprobs"}),
        is_on_policy=False,
        is_group_relative=False,
        drops_equal_rewards=False,
        needs_sequences=True,
    ),
    "rec": AlgorithmEntry(
        compute_advantages=baselines.compute_rec_advantages,
        compute_terms=sequence_terms.compute_sequence_ratio_terms,
        compute_losses=policy.compute_rec_losses,
        find_needs=find_rec_needs,
        is_on_policy=False,
        reads_tokens=True,
        needs_sequences=True,
    ),
    "raft": AlgorithmEntry(
        compute_advantages=baselines.compute_raft_advantages,
        compute_losses=policy.compute_sft_losses,
        is_on_policy=False,
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "ppo": replace(RETURNS, compute_terms=returns.compute_ppo_terms, needs=frozenset({"values"})),
    "reinforceplusplus": replace(RETURNS, compute_terms=returns.compute_reinforce_plus_plus_terms),
    "reinforceplusplus_baseline": AlgorithmEntry(compute_advantages=group.compute_batch_normalized_advantages),
    "remax": AlgorithmEntry(
        compute_advantages=baselines.compute_remax_advantages,
        needs=frozenset({"baselines"}),
        needs_current_weights=True,
        is_group_relative=False,
    ),
    "on_policy_distill": replace(DISTILLATION, compute_terms=returns.compute_distillation_terms),
    "jsd": replace(DISTILLATION, compute_terms=returns.compute_jsd_terms),
    "dppo_tv": replace(DPPO, compute_losses=policy.compute_dppo_tv_losses),
    "dppo_kl": replace(DPPO, compute_losses=policy.compute_dppo_kl_losses),
    "gmpo": replace(GSPO, compute_terms=sequence_terms.compute_gmpo_terms, compute_losses=policy.compute_gmpo_losses),
    "luspo": replace(
        GSPO, loss_args={"clip_range_low": 2e-3, "clip_range_high": 2.5e-3}, aggregation="seq-mean-token-sum"
    ),
    "vespo": AlgorithmEntry(
        compute_advantages=group.compute_dr_grpo_advantages,
        compute_terms=sequence_terms.compute_vespo_terms,
        compute_losses=policy.compute_reinforce_losses,
        loss_args={"ratio_cap": None},
        needs=frozenset({"logprobs"}),
        aggregation="seq-mean-token-sum",
        is_on_policy=False,
        needs_sequences=True,
    ),
    "clip_cov": AlgorithmEntry(compute_terms=sequence_terms.compute_clip_cov_terms, needs=frozenset({"logprobs"})),
    "kl_cov": AlgorithmEntry(
        compute_terms=sequence_terms.compute_kl_cov_terms,
        compute_losses=policy.compute_kl_cov_losses,
        needs=frozenset({"logprobs"}),
    ),
    "aepo": AlgorithmEntry(
        compute_advantages=group.compute_multi_step_grpo_advantages,
        compute_terms=policy.compute_aepo_terms,
        compute_losses=policy.compute_aepo_losses,
        needs=frozenset({"entropies"}),
    ),
    "mix": AlgorithmEntry(
        compute_terms=policy.compute_mix_terms, compute_losses=policy.compute_mix_losses, needs=frozenset({"experts"})
    ),
    "mix_chord": AlgorithmEntry(
        compute_terms=policy.compute_chord_terms,
        compute_losses=policy.compute_chord_losses,
        needs=frozenset({"experts"}),
    ),
    "sft": AlgorithmEntry(compute_advantages=None, compute_losses=policy.compute_sft_losses),
    "sft_is": AlgorithmEntry(compute_advantages=None, compute_losses=policy.compute_sft_is_losses),
    "sft_phi": AlgorithmEntry(compute_advantages=None, compute_losses=policy.compute_sft_phi_losses),
    "dpo": replace(PREFERENCE, compute_terms=preference.compute_dpo_terms, needs=PREFERENCE.needs | {"reference"}),
    "kto": replace(PREFERENCE, compute_terms=preference.compute_kto_terms, needs=PREFERENCE.needs | {"reference"}),
    "orpo": replace(PREFERENCE, compute_terms=preference.compute_orpo_terms),
    "simpo": replace(PREFERENCE, compute_terms=preference.compute_simpo_terms),
}
