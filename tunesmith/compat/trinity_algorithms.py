"""Names and arguments of Trinity-RFT's algorithms: advantage functions, policy losses, KL, entropy, corrections.

There an algorithm is a set of parts that can be exchanged one by one; here it is a line of one table. A file's parts
become the line that has them, and parts that no line puts together are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.compat.trinity_draft import Draft, Rule, accept, allow, move, read_mapping, walk
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError

DEFAULT_TYPE = AlgorithmSection().algorithm_type
DEFAULT_KL_COEF = 0.001
KL_NAMES = {"low_var_kl": "k3", "mse": "k2", "kl": "k1"}
PARTS: dict[str, tuple[str | None, str]] = {
    "ppo": ("ppo", "ppo"),
    "grpo": ("grpo", "ppo"),
    "multi_step_grpo": ("step_wise_grpo", "ppo"),
    "dapo": ("grpo", "ppo"),
    "gigpo": ("gigpo", "ppo"),
    "rloo": ("rloo", "ppo"),
    "remax": ("remax", "ppo"),
    "reinforceplusplus": ("reinforceplusplus", "ppo"),
    "on_policy_distill": ("on_policy_distill", "ppo"),
    "jsd": ("jsd", "ppo"),
    "cispo": ("grpo", "cispo"),
    "gspo": ("grpo", "gspo"),
    "sapo": ("grpo", "sapo"),
    "m2po": ("grpo", "m2po"),
    "importance_sampling": ("grpo", "importance_sampling"),
    "opmd": ("opmd", "opmd"),
    "sppo": ("opmd", "sppo"),
    "asymre": ("asymre", "opmd"),
    "topr": ("reinforce", "topr"),
    "rec": ("rec", "rec"),
    "mix": ("grpo", "mix"),
    "mix_chord": ("grpo", "mix_chord"),
    "raft": (None, "sft"),
    "sft": (None, "sft"),
    "sft_is": (None, "sft_is"),
    "sft_phi": (None, "sft_phi"),
    "dpo": (None, "dpo"),
}
"""Our algorithm -> advantage function and policy loss that make it there."""
REFUSED_TYPES = {
    "grpo_verl": "its advantages and its trainer do not fit together there; nearest is grpo",
    "cpt": "plain text is not trained; nearest is sft, on conversations",
}
REFUSED_ADVANTAGES = {
    "clipb": "token entropies over the vocabulary do not select tokens here; nearest is dapo",
    "clipv": "token entropies over the vocabulary do not select tokens here; nearest is dapo",
}
TERMS_ARGS: dict[str, Mapping[str, str]] = {
    "ppo": {"gamma": "gamma", "lam": "lam"},
    "reinforceplusplus": {"gamma": "gamma"},
    "on_policy_distill": {"kl_coef": "kl_coef"},
    "jsd": {"kl_coef": "kl_coef"},
    "topr": {"advantage_threshold": "advantage_threshold"},
    "mix": {"mu": "mu"},
    "mix_chord": {name: name for name in ("mu_peak", "mu_valley", "mu_warmup_steps", "mu_decay_steps")},
}
"""Arguments, of either function there, that belong to what comes between the two here."""
MIXTURE_SIZES = frozenset(
    {
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    }
)
"""Batch sizes that a file repeats for the mixtures there; here each kind of data is averaged by itself."""
ADVANTAGE_ARGS = {"opmd_baseline": "baseline"}
REWARD_KL_TYPES = ("ppo", "reinforceplusplus", "rloo")


def find_algorithm(draft: Draft) -> str:
    """The algorithm that has the file's parts."""
    named = draft.find("algorithm.algorithm_type", DEFAULT_TYPE)
    if named in REFUSED_TYPES:
        raise ConfigError(f"algorithm.algorithm_type={named!r} cannot be honoured: {REFUSED_TYPES[named]}")
    if named not in PARTS:
        return named
    own_advantage, own_loss = PARTS[named]
    advantage = draft.find("algorithm.advantage_fn", own_advantage)
    loss = draft.find("algorithm.policy_loss_fn", own_loss)
    if advantage in REFUSED_ADVANTAGES:
        raise ConfigError(f"algorithm.advantage_fn={advantage!r} cannot be honoured: {REFUSED_ADVANTAGES[advantage]}")
    if advantage == named:
        advantage = own_advantage
    matching = [name for name, parts in PARTS.items() if parts == (advantage, loss)]
    if not matching:
        raise ConfigError(
            f"algorithm.policy_loss_fn={loss!r} with algorithm.advantage_fn={advantage!r} cannot be honoured: no "
            f"algorithm has both; {_list_partners(advantage, loss)}; choose another algorithm_type"
        )
    return named if named in matching else matching[0]


def read_algorithm(draft: Draft, key: str, value: Any) -> None:
    """The three keys that name the algorithm name it together."""
    if value is not None:
        draft.set("algorithm.algorithm_type", find_algorithm(draft), source=key)


def read_advantage_args(draft: Draft, key: str, value: Any) -> None:
    """Arguments of the advantage function that differ from its defaults."""
    args = {ADVANTAGE_ARGS.get(name, name): given for name, given in read_mapping(value, key).items()}
    allow(False, reason="a step trains the groups that teach, however few; see experience.refill_budget")(
        draft, f"{key}.duplicate_experiences", args.pop("duplicate_experiences", None)
    )
    if args.get("drop") == "":
        del args["drop"]
    _set_args(draft, key, "advantage_args", args)


def read_loss_args(draft: Draft, key: str, value: Any) -> None:
    """Arguments of the loss that differ from its defaults; the others keep theirs."""
    args = dict(read_mapping(value, key))
    if args.get("loss_agg_mode") is not None:
        draft.set("algorithm.loss_aggregation", args["loss_agg_mode"], source=f"{key}.loss_agg_mode")
    if args.get("clip_range") is not None:
        args = {"clip_range_low": args["clip_range"], "clip_range_high": args["clip_range"]} | args
    if args.get("enable_sequence_masking"):
        delta = args.get("delta_sequence_masking", 0.1)
        draft.set("algorithm.correction.negative_sequence_delta", delta, source=f"{key}.enable_sequence_masking")
    for name in ("loss_agg_mode", "clip_range", "enable_sequence_masking", "delta_sequence_masking"):
        args.pop(name, None)
    if find_algorithm(draft) in ("mix", "mix_chord"):
        args = {name: given for name, given in args.items() if name not in MIXTURE_SIZES}
    _set_args(draft, key, "loss_args", args)


def read_kl_name(draft: Draft, key: str, value: Any) -> None:
    """The KL to the starting model; with no coefficient in the file, Trinity's own."""
    if value is None:
        return
    if value == "none" or draft.find("algorithm.kl_loss_fn_args.kl_coef") == 0:
        draft.set("algorithm.kl_coef", 0.0, source=key)
        return
    draft.set("algorithm.kl_estimator", KL_NAMES.get(value, value), source=key)
    if draft.find("algorithm.kl_loss_fn_args.kl_coef") is None:
        draft.set("algorithm.kl_coef", DEFAULT_KL_COEF, source=key)


def read_kl_args(draft: Draft, key: str, value: Any) -> None:
    given = read_mapping(value, key)
    unused = accept("the coefficient is constant, because adaptive is off")
    rules: dict[str, Rule] = {"kl_coef": move("algorithm.kl_coef", float), "adaptive": accept()}
    if given.get("adaptive"):
        if given.get("target_kl") is None:
            raise ConfigError(f"{key}.adaptive=True needs {key}.target_kl, the KL in nats a token to steer to")
        rules |= {
            "target_kl": move("algorithm.kl_adaptive.target", float),
            "horizon": move("algorithm.kl_adaptive.horizon", int),
        }
    else:
        rules |= {"target_kl": unused, "horizon": unused}
    walk(draft, rules, given, place=f"{key}.")


def read_penalty_name(draft: Draft, key: str, value: Any) -> None:
    """A KL in the reward, for the algorithms whose papers have it there."""
    if value in (None, "none"):
        return
    algorithm = find_algorithm(draft)
    if algorithm not in REWARD_KL_TYPES:
        raise ConfigError(
            f"{key}={value!r} cannot be honoured: {algorithm} has its KL in the loss (kl_loss_fn); in the reward it is "
            f"for {', '.join(REWARD_KL_TYPES)}"
        )
    allow("k1", "kl", reason="the KL in the reward is estimated by k1")(draft, key, value)
    if draft.find("algorithm.kl_penalty_fn_args.kl_coef") is None:
        draft.set("algorithm.terms_args.reward_kl_coef", DEFAULT_KL_COEF, source=key)


def read_penalty_args(draft: Draft, key: str, value: Any) -> None:
    if draft.find("algorithm.kl_penalty_fn", "none") == "none":
        accept("there is no kl_penalty_fn")(draft, key, value or None)
        return
    constant = allow(False, 0, reason="the coefficient of a KL in the reward is constant")
    rules: dict[str, Rule] = {
        "kl_coef": move("algorithm.terms_args.reward_kl_coef", float),
        "adaptive": constant,
        "target_kl": accept("the coefficient is constant"),
        "horizon": accept("the coefficient is constant"),
    }
    walk(draft, rules, read_mapping(value, key), place=f"{key}.")


def read_entropy_name(draft: Draft, key: str, value: Any) -> None:
    own = ("mix",) if find_algorithm(draft) in ("mix", "mix_chord") else ()
    reason = "the entropy bonus is the mean entropy of sampled tokens; choose default or none"
    allow("default", "none", *own, reason=reason)(draft, key, value)
    if value == "none":
        draft.set("algorithm.entropy_coef", 0.0, source=key)


def read_entropy_args(draft: Draft, key: str, value: Any) -> None:
    rules = {"entropy_coef": move("algorithm.entropy_coef", float)}
    walk(draft, rules, read_mapping(value, key), place=f"{key}.")


def read_correction(draft: Draft, key: str, value: Any) -> None:
    """Importance weights between sampler and trainer, in the words of verl."""
    given = read_mapping(value, key)
    low, high = given.get("rollout_rs_threshold_lower"), given.get("rollout_rs_threshold")
    if given.get("rollout_rs") is not None:
        if high is None:
            raise ConfigError(f"{key}.rollout_rs needs {key}.rollout_rs_threshold, the largest weight that trains")
        mask = {"level": given["rollout_rs"], "low": 1 / high if low is None else low, "high": high}
        draft.set("algorithm.correction.mask", mask, source=f"{key}.rollout_rs")
    unused = accept() if given.get("rollout_rs") is not None else accept("there is no rollout_rs")
    cap = move("algorithm.correction.cap", float)
    rules: dict[str, Rule] = {
        "rollout_is": move("algorithm.correction.importance"),
        "rollout_is_threshold": cap if given.get("rollout_is") is not None else accept("there is no rollout_is"),
        "rollout_rs": accept(),
        "rollout_rs_threshold": unused,
        "rollout_rs_threshold_lower": unused,
        "rollout_token_veto_threshold": allow(None, reason="nearest is rollout_rs: sequence, a mask of sequences"),
        "rollout_is_batch_normalize": allow(False, reason="weights are not divided by their mean"),
        "bypass_mode": allow(False, reason="corrected losses compare with the policy that the step began with"),
    }
    walk(draft, rules, given, place=f"{key}.")


def _set_args(draft: Draft, key: str, target: str, args: Mapping[str, Any]) -> None:
    """Hand arguments on, each to the function that has it here; None leaves our default."""
    of_terms = TERMS_ARGS.get(find_algorithm(draft), {})
    own = {name: given for name, given in args.items() if given is not None and name not in of_terms}
    if own:
        draft.set(f"algorithm.{target}", own, source=key)
    for name, given in args.items():
        if given is not None and name in of_terms:
            draft.set(f"algorithm.terms_args.{of_terms[name]}", given, source=f"{key}.{name}")


def _list_partners(advantage: str | None, loss: str) -> str:
    losses = dict.fromkeys(parts[1] for parts in PARTS.values() if parts[0] == advantage)
    advantages = dict.fromkeys(parts[0] for parts in PARTS.values() if parts[1] == loss and parts[0] is not None)
    return f"{advantage!r} goes with {', '.join(losses) or 'none'}, {loss!r} with {', '.join(advantages) or 'none'}"
