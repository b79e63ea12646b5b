"""The table of algorithms by name.

An entry combines an advantage function, a function over all tokens of the update (`compute_terms`) and a loss function.
Users set the keyword arguments of these functions, whose types, ranges and defaults are in their signatures;
`algorithm.resolve_algorithm` refuses all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.algorithms.advantages.baselines import (
    compute_asymre_advantages,
    compute_opmd_advantages,
    compute_opo_advantages,
    compute_raft_advantages,
    compute_rec_advantages,
    compute_reinforce_advantages,
    compute_rloo_advantages,
)
from tunesmith.algorithms.advantages.distillation import compute_distillation_terms, compute_jsd_terms
from tunesmith.algorithms.advantages.gigpo import compute_gigpo_advantages
from tunesmith.algorithms.advantages.group import (
    Advantages,
    compute_batch_normalized_advantages,
    compute_bnpo_advantages,
    compute_dr_grpo_advantages,
    compute_grpo_advantages,
    compute_maxrl_advantages,
    compute_multi_step_grpo_advantages,
)
from tunesmith.algorithms.advantages.multi_reward import compute_gdpo_advantages
from tunesmith.algorithms.advantages.pass_at_k import compute_pass_at_k_advantages
from tunesmith.algorithms.advantages.returns import compute_ppo_terms, compute_reinforce_plus_plus_terms
from tunesmith.algorithms.advantages.single_run import compute_remax_advantages, keep_rewards
from tunesmith.algorithms.aggregation import Aggregation
from tunesmith.algorithms.losses.bounded_ratio import (
    compute_cispo_losses,
    compute_gmpo_losses,
    compute_gspo_losses,
    compute_sapo_losses,
    compute_sppo_losses,
)
from tunesmith.algorithms.losses.clipped import (
    compute_ppo_clip_losses,
    compute_sft_is_losses,
    compute_sft_losses,
    compute_sft_phi_losses,
)
from tunesmith.algorithms.losses.divergence import compute_dppo_kl_losses, compute_dppo_tv_losses
from tunesmith.algorithms.losses.entropy_balanced import compute_aepo_losses, compute_aepo_terms
from tunesmith.algorithms.losses.expert_mixture import (
    compute_chord_losses,
    compute_chord_terms,
    compute_mix_losses,
    compute_mix_terms,
)
from tunesmith.algorithms.losses.preference import compute_dpo_terms, compute_kto_terms, compute_preference_losses
from tunesmith.algorithms.losses.reference_free import compute_orpo_terms, compute_simpo_terms
from tunesmith.algorithms.losses.reinforce import (
    compute_importance_sampling_losses,
    compute_kl_cov_losses,
    compute_opmd_losses,
    compute_rec_losses,
    compute_reinforce_losses,
)
from tunesmith.algorithms.scores import Need, TokenInputs, TokenLosses, keep_advantages
from tunesmith.algorithms.sequence_terms import (
    compute_gmpo_terms,
    compute_m2po_terms,
    compute_rloo_terms,
    compute_sequence_ratio_terms,
    compute_topr_terms,
    compute_vespo_terms,
)
from tunesmith.algorithms.token_selection import compute_clip_cov_terms, compute_kl_cov_terms


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

    compute_advantages: Callable[..., Advantages] | None
    """None for algorithms that train on given completions, without rewards."""
    compute_losses: Callable[..., TokenLosses]
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the algorithm that differ from those of the loss function."""
    aggregation: Aggregation = "token-mean"
    compute_terms: Callable[..., TokenInputs] = keep_advantages
    """Function of all tokens of an update, run between advantages and losses."""
    terms_args: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the algorithm that differ from those of `compute_terms`."""
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


ALGORITHMS: dict[str, AlgorithmEntry] = {
    "grpo": AlgorithmEntry(compute_advantages=compute_grpo_advantages, compute_losses=compute_ppo_clip_losses),
    "multi_step_grpo": AlgorithmEntry(
        compute_advantages=compute_multi_step_grpo_advantages, compute_losses=compute_ppo_clip_losses
    ),
    "dr_grpo": AlgorithmEntry(
        compute_advantages=compute_dr_grpo_advantages,
        compute_losses=compute_ppo_clip_losses,
        aggregation="seq-mean-token-sum-norm",
    ),
    "dapo": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_losses=compute_ppo_clip_losses,
        loss_args={"clip_range_high": 0.28},
    ),
    "bnpo": AlgorithmEntry(compute_advantages=compute_bnpo_advantages, compute_losses=compute_ppo_clip_losses),
    "maxrl": AlgorithmEntry(
        compute_advantages=compute_maxrl_advantages,
        compute_losses=compute_ppo_clip_losses,
        aggregation="seq-mean-token-sum",
    ),
    "pass_at_k": AlgorithmEntry(
        compute_advantages=compute_pass_at_k_advantages, compute_losses=compute_ppo_clip_losses
    ),
    "gdpo": AlgorithmEntry(
        compute_advantages=compute_gdpo_advantages,
        compute_losses=compute_ppo_clip_losses,
        needs=frozenset({"reward_parts"}),
    ),
    "gigpo": AlgorithmEntry(
        compute_advantages=compute_gigpo_advantages,
        compute_losses=compute_ppo_clip_losses,
        is_group_relative=False,
        reads_tokens=True,
    ),
    "rloo": AlgorithmEntry(
        compute_advantages=compute_rloo_advantages,
        compute_terms=compute_rloo_terms,
        compute_losses=compute_ppo_clip_losses,
        aggregation="seq-mean-token-sum",
        needs_sequences=True,
    ),
    "reinforce": AlgorithmEntry(
        compute_advantages=compute_reinforce_advantages,
        compute_losses=compute_reinforce_losses,
        aggregation="seq-mean-token-sum",
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "opo": AlgorithmEntry(
        compute_advantages=compute_opo_advantages,
        compute_losses=compute_reinforce_losses,
        aggregation="seq-mean-token-sum",
        needs_current_weights=True,
        reads_tokens=True,
    ),
    "cispo": AlgorithmEntry(compute_advantages=compute_grpo_advantages, compute_losses=compute_cispo_losses),
    "gspo": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_sequence_ratio_terms,
        compute_losses=compute_gspo_losses,
        needs=frozenset({"logprobs"}),
        aggregation="seq-mean-token-mean",
        needs_sequences=True,
    ),
    "sapo": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_losses=compute_sapo_losses,
        aggregation="seq-mean-token-mean",
    ),
    "sppo": AlgorithmEntry(compute_advantages=compute_opmd_advantages, compute_losses=compute_sppo_losses),
    "importance_sampling": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_losses=compute_importance_sampling_losses,
        is_on_policy=False,
    ),
    "m2po": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_m2po_terms,
        compute_losses=compute_importance_sampling_losses,
        needs=frozenset({"logprobs"}),
        is_on_policy=False,
    ),
    "opmd": AlgorithmEntry(
        compute_advantages=compute_opmd_advantages, compute_losses=compute_opmd_losses, is_on_policy=False
    ),
    "asymre": AlgorithmEntry(
        compute_advantages=compute_asymre_advantages,
        compute_losses=compute_opmd_losses,
        loss_args={"tau": 0.0},
        is_on_policy=False,
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "topr": AlgorithmEntry(
        compute_advantages=compute_reinforce_advantages,
        compute_terms=compute_topr_terms,
        compute_losses=compute_reinforce_losses,
        loss_args={"ratio_cap": None},
        needs=frozenset({"logprobs"}),
        is_on_policy=False,
        is_group_relative=False,
        drops_equal_rewards=False,
        needs_sequences=True,
    ),
    "rec": AlgorithmEntry(
        compute_advantages=compute_rec_advantages,
        compute_terms=compute_sequence_ratio_terms,
        compute_losses=compute_rec_losses,
        find_needs=find_rec_needs,
        is_on_policy=False,
        reads_tokens=True,
        needs_sequences=True,
    ),
    "raft": AlgorithmEntry(
        compute_advantages=compute_raft_advantages,
        compute_losses=compute_sft_losses,
        is_on_policy=False,
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "ppo": AlgorithmEntry(
        compute_advantages=keep_rewards,
        compute_terms=compute_ppo_terms,
        compute_losses=compute_ppo_clip_losses,
        needs=frozenset({"values"}),
        is_group_relative=False,
        drops_equal_rewards=False,
        needs_sequences=True,
    ),
    "reinforceplusplus": AlgorithmEntry(
        compute_advantages=keep_rewards,
        compute_terms=compute_reinforce_plus_plus_terms,
        compute_losses=compute_ppo_clip_losses,
        is_group_relative=False,
        drops_equal_rewards=False,
        needs_sequences=True,
    ),
    "reinforceplusplus_baseline": AlgorithmEntry(
        compute_advantages=compute_batch_normalized_advantages, compute_losses=compute_ppo_clip_losses
    ),
    "remax": AlgorithmEntry(
        compute_advantages=compute_remax_advantages,
        compute_losses=compute_ppo_clip_losses,
        needs=frozenset({"baselines"}),
        needs_current_weights=True,
        is_group_relative=False,
    ),
    "on_policy_distill": AlgorithmEntry(
        compute_advantages=keep_rewards,
        compute_terms=compute_distillation_terms,
        compute_losses=compute_ppo_clip_losses,
        needs=frozenset({"teacher"}),
        needs_current_weights=True,
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "jsd": AlgorithmEntry(
        compute_advantages=keep_rewards,
        compute_terms=compute_jsd_terms,
        compute_losses=compute_ppo_clip_losses,
        needs=frozenset({"teacher"}),
        needs_current_weights=True,
        is_group_relative=False,
        drops_equal_rewards=False,
    ),
    "dppo_tv": AlgorithmEntry(
        compute_advantages=compute_dr_grpo_advantages,
        compute_losses=compute_dppo_tv_losses,
        aggregation="seq-mean-token-sum-norm",
        is_on_policy=False,
    ),
    "dppo_kl": AlgorithmEntry(
        compute_advantages=compute_dr_grpo_advantages,
        compute_losses=compute_dppo_kl_losses,
        aggregation="seq-mean-token-sum-norm",
        is_on_policy=False,
    ),
    "gmpo": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_gmpo_terms,
        compute_losses=compute_gmpo_losses,
        needs=frozenset({"logprobs"}),
        aggregation="seq-mean-token-mean",
        needs_sequences=True,
    ),
    "luspo": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_sequence_ratio_terms,
        compute_losses=compute_gspo_losses,
        loss_args={"clip_range_low": 2e-3, "clip_range_high": 2.5e-3},
        needs=frozenset({"logprobs"}),
        aggregation="seq-mean-token-sum",
        needs_sequences=True,
    ),
    "vespo": AlgorithmEntry(
        compute_advantages=compute_dr_grpo_advantages,
        compute_terms=compute_vespo_terms,
        compute_losses=compute_reinforce_losses,
        loss_args={"ratio_cap": None},
        needs=frozenset({"logprobs"}),
        aggregation="seq-mean-token-sum",
        is_on_policy=False,
        needs_sequences=True,
    ),
    "clip_cov": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_clip_cov_terms,
        compute_losses=compute_ppo_clip_losses,
        needs=frozenset({"logprobs"}),
    ),
    "kl_cov": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_kl_cov_terms,
        compute_losses=compute_kl_cov_losses,
        needs=frozenset({"logprobs"}),
    ),
    "aepo": AlgorithmEntry(
        compute_advantages=compute_multi_step_grpo_advantages,
        compute_terms=compute_aepo_terms,
        compute_losses=compute_aepo_losses,
        needs=frozenset({"entropies"}),
    ),
    "mix": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_mix_terms,
        compute_losses=compute_mix_losses,
        needs=frozenset({"experts"}),
    ),
    "mix_chord": AlgorithmEntry(
        compute_advantages=compute_grpo_advantages,
        compute_terms=compute_chord_terms,
        compute_losses=compute_chord_losses,
        needs=frozenset({"experts"}),
    ),
    "sft": AlgorithmEntry(compute_advantages=None, compute_losses=compute_sft_losses),
    "sft_is": AlgorithmEntry(compute_advantages=None, compute_losses=compute_sft_is_losses),
    "sft_phi": AlgorithmEntry(compute_advantages=None, compute_losses=compute_sft_phi_losses),
    "dpo": AlgorithmEntry(
        compute_advantages=None,
        compute_terms=compute_dpo_terms,
        compute_losses=compute_preference_losses,
        needs=frozenset({"logprobs", "reference"}),
        aggregation="sum",
        needs_sequences=True,
    ),
    "kto": AlgorithmEntry(
        compute_advantages=None,
        compute_terms=compute_kto_terms,
        compute_losses=compute_preference_losses,
        needs=frozenset({"logprobs", "reference"}),
        aggregation="sum",
        needs_sequences=True,
    ),
    "orpo": AlgorithmEntry(
        compute_advantages=None,
        compute_terms=compute_orpo_terms,
        compute_losses=compute_preference_losses,
        needs=frozenset({"logprobs"}),
        aggregation="sum",
        needs_sequences=True,
    ),
    "simpo": AlgorithmEntry(
        compute_advantages=None,
        compute_terms=compute_simpo_terms,
        compute_losses=compute_preference_losses,
        needs=frozenset({"logprobs"}),
        aggregation="sum",
        needs_sequences=True,
    ),
}
