"""Rules for Trinity-RFT's algorithm keys: advantage functions, policy losses, KL, entropy, rollout correction.

In Trinity-RFT the parts of an algorithm can be set one by one; in Tunesmith an algorithm is one entry of a table. The
parts of a file select the entry that has them; combinations without an entry are refused. After the rules of single
keys, `resolve_differences` sets or notes what differs under one name: formulas of losses, and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.arguments import suggest_name
from tunesmith.compat.trinity_draft import Draft, Rule, accept, allow, move, read_mapping, walk
from tunesmith.config import AlgorithmSection, EvaluationSection, RolloutSection, RunConfig, TrainerSection
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
"""Our algorithm -> Trinity-RFT's advantage function and policy loss of it."""
ADVANTAGES = "tunesmith.algorithms.advantages.group"
GROUP_ADVANTAGES = {
    "grpo": f"{ADVANTAGES}:compute_grpo_advantages",
    "step_wise_grpo": f"{ADVANTAGES}:compute_multi_step_grpo_advantages",
}
"""Advantage functions that may take the place of another algorithm's."""
REPLACED_ADVANTAGES = ("grpo", "rec")
REFUSED_TYPES = {
    "grpo_verl": "in Trinity-RFT its advantage function and its trainer are incompatible; nearest is grpo",
    "cpt": "training on plain text is not implemented; nearest is sft, on conversations",
}
REFUSED_ADVANTAGES = dict.fromkeys(
    ("clipb", "clipv"), "tokens are not masked by how much they change the entropy; nearest is clip_cov"
)
TERMS_ARGS: dict[str, Mapping[str, str]] = {
    "ppo": {"gamma": "gamma", "lam": "lam"},
    "reinforceplusplus": {"gamma": "gamma"},
    "on_policy_distill": {"kl_coef": "kl_coef"},
    "jsd": {"kl_coef": "kl_coef", "lambda_coef": "beta"},
    "topr": {"advantage_threshold": "advantage_threshold"},
    "mix": {"mu": "mu"},
    "mix_chord": {name: name for name in ("mu_peak", "mu_valley", "mu_warmup_steps", "mu_decay_steps")},
}
"""Arguments of Trinity-RFT's advantage function or policy loss that are `terms_args` of our algorithm."""
MIXTURE_SIZES = frozenset(
    {"use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer"}
    | {"train_batch_size_usual", "train_batch_size_expert"}
)
"""Batch sizes that Trinity-RFT's mixture losses need; not used, because each kind of data is averaged separately."""
ADVANTAGE_ARGS = {"opmd_baseline": "baseline"}
REWARD_KL_TYPES = ("ppo", "reinforceplusplus", "rloo")


def find_algorithm(draft: Draft) -> str:
    """The algorithm that has the parts named in the file."""
    from tunesmith.algorithms.table import ALGORITHMS  # imports torch, which run files of our own do without

    named: str = draft.find("algorithm.algorithm_type", DEFAULT_TYPE, kind=str)
    if named in REFUSED_TYPES:
        raise ConfigError(f"algorithm.algorithm_type={named!r} is not supported: {REFUSED_TYPES[named]}")
    if named not in ALGORITHMS:
        raise ConfigError(f"algorithm.algorithm_type={named!r} is unknown: {suggest_name(named, list(ALGORITHMS))}")
    own_advantage, own_loss = PARTS.get(named, (named, named))
    advantage = draft.find("algorithm.advantage_fn", own_advantage, kind=str)
    loss = draft.find("algorithm.policy_loss_fn", own_loss, kind=str)
    if advantage in REFUSED_ADVANTAGES:
        raise ConfigError(f"algorithm.advantage_fn={advantage!r} is not supported: {REFUSED_ADVANTAGES[advantage]}")
    if named not in PARTS:
        for key, part in (("advantage_fn", advantage), ("policy_loss_fn", loss)):
            if part != named:
                raise ConfigError(
                    f"algorithm.{key}={part!r} is not supported with algorithm_type={named!r}, which Trinity-RFT does "
                    "not have: remove it, or choose another algorithm_type"
                )
        return named
    if advantage == named:
        advantage = own_advantage
    matching = [name for name, parts in PARTS.items() if parts == (advantage, loss)]
    if not matching and advantage in GROUP_ADVANTAGES:
        matching = [name for name, parts in PARTS.items() if parts[1] == loss and parts[0] in REPLACED_ADVANTAGES]
    if not matching:
        raise ConfigError(
            f"algorithm.policy_loss_fn={loss!r} with algorithm.advantage_fn={advantage!r} is not supported: no "
            f"algorithm has both; {_list_partners(advantage, loss)}; choose another algorithm_type"
        )
    return named if named in matching else matching[0]


def read_algorithm(draft: Draft, key: str, value: Any) -> None:
    """Rule for the three keys that together name the algorithm."""
    if value is None:
        return
    if key.endswith("advantage_fn") and draft.find(key, kind=str) in REFUSED_ADVANTAGES:
        raise ConfigError(f"{key}={value!r} is not supported: {REFUSED_ADVANTAGES[value]}")
    name = find_algorithm(draft)
    draft.set("algorithm.algorithm_type", name, source=key)
    named = draft.find("algorithm.algorithm_type", name)
    advantage = draft.find("algorithm.advantage_fn", PARTS[named][0] if named in PARTS else None)
    if name in PARTS and advantage in GROUP_ADVANTAGES and advantage != PARTS[name][0]:
        draft.set("algorithm.advantage", GROUP_ADVANTAGES[advantage], source=key)


def read_advantage_args(draft: Draft, key: str, value: Any) -> None:
    args = {ADVANTAGE_ARGS.get(name, name): given for name, given in read_mapping(value, key).items()}
    allow(False, reason="groups are not duplicated to fill a batch; nearest is experience.refill_budget")(
        draft, f"{key}.duplicate_experiences", args.pop("duplicate_experiences", None)
    )
    accept("Trinity-RFT ignores it too: its argument is enable_step_norm")(
        draft, f"{key}.step_norm", args.pop("step_norm", None)
    )
    if args.get("drop") == "":
        del args["drop"]
    _set_args(draft, key, "advantage_args", args)


def read_loss_args(draft: Draft, key: str, value: Any) -> None:
    """Arguments of the policy loss; some of them are keys of other sections here."""
    args = {name: given for name, given in read_mapping(value, key).items() if given is not None}
    if find_algorithm(draft) in MIXTURES:
        args = read_mixture_args(draft, key, args)
    if (mode := args.pop("loss_agg_mode", None)) is not None:
        draft.set("algorithm.loss_aggregation", mode, source=f"{key}.loss_agg_mode")
    if (clip_range := args.pop("clip_range", None)) is not None:
        args = {"clip_range_low": clip_range, "clip_range_high": clip_range} | args
    delta = args.pop("delta_sequence_masking", 0.1)
    if args.pop("enable_sequence_masking", False):
        draft.set("algorithm.correction.negative_sequence_delta", delta, source=f"{key}.enable_sequence_masking")
    _set_args(draft, key, "loss_args", args)


def read_mixture_args(draft: Draft, key: str, args: dict[str, Any]) -> dict[str, Any]:
    """As of other losses: both parts have one aggregation here, and `mix_chord` without phi has the loss of `mix`."""
    parts = [args.pop(f"{part}_loss_agg_mode", None) or args.get("loss_agg_mode") for part in ("grpo", "sft")]
    if parts[0] != parts[1] and parts not in ([None, "token-mean"], ["token-mean", None]):
        raise ConfigError(
            f"{key}: grpo_loss_agg_mode and sft_loss_agg_mode must be equal, got {parts[0]!r}, {parts[1]!r}"
        )
    if find_algorithm(draft) == "mix_chord" and args.pop("enable_phi_function", None) is False:
        draft.set("algorithm.loss", MIX_LOSS, source=f"{key}.enable_phi_function")
    return {name: given for name, given in args.items() if name not in MIXTURE_SIZES} | {"loss_agg_mode": parts[1]}


def read_kl_name(draft: Draft, key: str, value: Any) -> None:
    """The estimator of the KL to the starting model; without a coefficient in the file, Trinity-RFT's default."""
    if value is None:
        return
    value = draft.find(key, kind=str)
    if value == "none" or draft.find("algorithm.kl_loss_fn_args.kl_coef", kind=float) == 0:
        draft.set("algorithm.kl_coef", 0.0, source=key)
        return
    draft.set("algorithm.kl_estimator", KL_NAMES.get(value, value), source=key)
    if draft.find("algorithm.kl_loss_fn_args.kl_coef") is None:
        draft.set("algorithm.kl_coef", DEFAULT_KL_COEF, source=key)


def read_kl_args(draft: Draft, key: str, value: Any) -> None:
    given = read_mapping(value, key)
    unused = accept("the KL coefficient is constant, because adaptive is off")
    rules = dict.fromkeys(("target_kl", "horizon"), unused)
    rules |= {"kl_coef": move("algorithm.kl_coef"), "adaptive": accept()}
    if given.get("adaptive"):
        if given.get("target_kl") is None:
            raise ConfigError(f"{key}.adaptive=True needs {key}.target_kl, the target KL in nats per token")
        rules |= {
            "target_kl": move("algorithm.kl_adaptive.target"),
            "horizon": move("algorithm.kl_adaptive.horizon"),
        }
    walk(draft, rules, given, parent=f"{key}.")


def read_penalty_name(draft: Draft, key: str, value: Any) -> None:
    """The KL penalty in the reward, for algorithms whose papers have it in the reward."""
    if value in (None, "none"):
        return
    algorithm = find_algorithm(draft)
    if algorithm not in REWARD_KL_TYPES:
        raise ConfigError(
            f"{key}={value!r} is not supported: {algorithm} has its KL in the loss (kl_loss_fn); a KL in the reward "
            f"is for {', '.join(REWARD_KL_TYPES)}"
        )
    allow("k1", "kl", reason="the KL in the reward is estimated by k1")(draft, key, value)
    if draft.find("algorithm.kl_penalty_fn_args.kl_coef") is None:
        draft.set("algorithm.terms_args.reward_kl_coef", DEFAULT_KL_COEF, source=key)


def read_penalty_args(draft: Draft, key: str, value: Any) -> None:
    if draft.find("algorithm.kl_penalty_fn", "none") == "none":
        accept("kl_penalty_fn is none")(draft, key, value or None)
        return
    constant, target = "the coefficient of the KL in the reward is constant", "algorithm.terms_args.reward_kl_coef"
    rules = dict.fromkeys(("target_kl", "horizon"), accept(constant))
    rules |= {"kl_coef": move(target), "adaptive": allow(False, 0, reason=constant)}
    walk(draft, rules, read_mapping(value, key), parent=f"{key}.")


def read_entropy_name(draft: Draft, key: str, value: Any) -> None:
    own = ("mix",) if find_algorithm(draft) in MIXTURES else ()
    reason = "the entropy bonus is the mean entropy of sampled tokens; choose default or none"
    allow("default", "none", *own, reason=reason)(draft, key, value)
    if value == "none":
        draft.set("algorithm.entropy_coef", 0.0, source=key)


def read_correction(draft: Draft, key: str, value: Any) -> None:
    """Importance weights and masks between sampler and trainer, under verl's names."""
    given = read_mapping(value, key)
    low, high = given.get("rollout_rs_threshold_lower"), draft.find(f"{key}.rollout_rs_threshold", kind=float)
    if given.get("rollout_rs") is not None:
        if not high:
            raise ConfigError(f"{key}.rollout_rs needs {key}.rollout_rs_threshold, the largest weight that is kept")
        mask = {"level": given["rollout_rs"], "low": 1 / high if low is None else low, "high": high}
        draft.set("algorithm.correction.mask", mask, source=f"{key}.rollout_rs")
    unused = accept() if given.get("rollout_rs") is not None else accept("rollout_rs is not set")
    cap = move("algorithm.correction.cap")
    rules: dict[str, Rule] = {
        "rollout_is": move("algorithm.correction.importance"),
        "rollout_is_threshold": cap if given.get("rollout_is") is not None else accept("rollout_is is not set"),
        "rollout_rs": accept(),
        "rollout_rs_threshold": unused,
        "rollout_rs_threshold_lower": unused,
        "rollout_token_veto_threshold": allow(None, reason="nearest is rollout_rs: sequence, which masks sequences"),
        "rollout_is_batch_normalize": allow(False, reason="weights are not divided by their mean"),
        "bypass_mode": allow(False, reason="with a correction, ratios are against the policy at the start of the step"),
    }
    walk(draft, rules, given, parent=f"{key}.")


def _set_args(draft: Draft, key: str, target: str, args: Mapping[str, Any]) -> None:
    """Set arguments in `target` or in `terms_args`, whichever has them; None keeps our default."""
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
    return f"{advantage!r} combines with {', '.join(losses) or 'none'}, {loss!r} with {', '.join(advantages) or 'none'}"


MIXTURES = ("mix", "mix_chord")
MIX_LOSS = "tunesmith.algorithms.losses.policy:compute_mix_losses"
DEFAULT_DATASET = "sft_dataset"
"""The auxiliary buffer that the mix strategy reads by default."""


def move_for_critic(target: str) -> Rule:
    """Set our key if the algorithm has a critic; otherwise the key has no effect, as in Trinity-RFT."""

    def apply(draft: Draft, key: str, value: Any) -> None:
        has_critic = find_algorithm(draft) == "ppo"
        rule = move(target) if has_critic else accept("this algorithm has no critic", silent=("", 0))
        rule(draft, key, value)

    return apply


def read_sample_strategy(draft: Draft, key: str, value: Any) -> None:
    own = ("mix",) if find_algorithm(draft) in MIXTURES else ()
    allow("default", "warmup", *own, reason="a step trains the rollouts it sampled; see experience.replay")(
        draft, key, value
    )


def read_sample_strategy_args(draft: Draft, key: str, value: Any) -> None:
    """The share of expert demonstrations in a batch."""
    rules = {"expert_data_ratio": move("algorithm.expert.ratio"), "sft_dataset_name": accept()}
    given = read_mapping(value, key)
    if given and find_algorithm(draft) not in MIXTURES:
        raise ConfigError(f"{key} is not supported: a step trains the rollouts it sampled; see experience.replay")
    walk(draft, rules, given, parent=f"{key}.")


def read_auxiliary_buffers(draft: Draft, key: str, value: Any) -> None:
    """The buffer of expert demonstrations; no other auxiliary buffer is supported."""
    expected = draft.find("algorithm.sample_strategy_args.sft_dataset_name", DEFAULT_DATASET)
    for name, section in read_mapping(value, key).items():
        if name != expected or find_algorithm(draft) not in MIXTURES:
            raise ConfigError(
                f"{key}.{name} is not supported: a step trains the rollouts it sampled; see algorithm.expert"
            )
        rules: dict[str, Rule] = {
            "name": accept(),
            "path": move("algorithm.expert.path"),
            "split": move("algorithm.expert.split"),
            "subset_name": move("algorithm.expert.name"),
            "schema_type": allow("sft", reason="expert demonstrations are conversations"),
            "storage_type": allow("file", reason="conversations are read from files and from the hub"),
            "format": accept("rows must have `messages`, and may have `tools`"),
            "total_epochs": accept("demonstrations are drawn in every step of the run"),
        }
        walk(draft, rules, read_mapping(section, f"{key}.{name}"), parent=f"{key}.{name}.")


WITHOUT_KL = frozenset(
    {"dapo", "asymre", "sppo", "raft", "on_policy_distill", "jsd", "sft", "sft_is", "sft_phi", "remax", "m2po"}
)
"""Algorithms without a KL to the starting model in Trinity-RFT, or without a default for it."""
DEFAULT_MU = 0.1
DIFFERENT_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "algorithm.repeat_times": (AlgorithmSection().group_size, 1),
    "algorithm.optimizer.weight_decay": (TrainerSection().weight_decay, 0.01),
    "buffer.batch_size": (AlgorithmSection().batch_size, 1),
    "explorer.max_timeout": (RolloutSection().timeout_s, 1800),
    "explorer.max_retry_times": (0, 2),
    "explorer.eval_on_startup": (EvaluationSection().at_start, True),
    "trainer.save_interval": (RunConfig.model_fields["save_interval_steps"].default, 0),
}
"""Key -> our default and Trinity-RFT's; noted if the file has the key's section but not the key."""
DIFFERENT_ARGS: dict[str, tuple[str, str, Any]] = {
    "gigpo": ("advantage_args", "gamma", 1.0),
    "topr": ("terms_args", "ratio_level", "token"),
}
"""Arguments whose defaults differ, with Trinity-RFT's; topr has ratios of sequences in its paper."""
NOTES = {
    "sapo": "the gate is differentiated, as in the paper, so at ratio 1 the gradient is the policy gradient; in "
    "Trinity-RFT the gate is a constant weight of the gradient: at ratio 1 it is 2 for A > 0 and 1.9 for A <= 0",
    "gigpo": "a turn is compared with turns of the same task that have the same prompt, or the same value of the "
    "metric advantage_args.env_state_hash_key; Trinity-RFT compares all turns of a batch with the same env_state_hash",
    "jsd": "the advantage is the gradient of the divergence, negative for tokens that the teacher finds less probable; "
    "Trinity-RFT's is negative for none",
} | dict.fromkeys(
    MIXTURES,
    "the losses of rollouts and of demonstrations are averaged separately, independent of micro-batches, so the batch "
    "sizes in policy_loss_fn_args are not needed",
)
"""What differs in an algorithm."""
SEQUENCES = "a sequence is a whole rollout with all its model calls (in Trinity-RFT each model call is one)"


def resolve_differences(draft: Draft) -> None:
    """Keep the file's meaning if our arguments can express it, and add notes on what differs."""
    if draft.find_mapping("algorithm"):
        name = find_algorithm(draft)
        if name in ("rec", "mix_chord"):
            (_resolve_rec if name == "rec" else _resolve_chord)(draft)
        if name in DIFFERENT_ARGS:
            target, key, value = DIFFERENT_ARGS[name]
            draft.open_section("algorithm", target).setdefault(key, value)
        if name in NOTES:
            draft.notes.append(f"{name}: {NOTES[name]}")
        _note_aggregation(draft, name)
    _note_defaults(draft)
    _note_selectors(draft)


def _resolve_rec(draft: Draft) -> None:
    """In Trinity-RFT, `gspo-one-side` always uses seq-mean-token-mean, whatever `loss_agg_mode` is."""
    if draft.find("algorithm.policy_loss_fn_args.clip_mode") != "gspo-one-side":
        return
    given = draft.open_section("algorithm").get("loss_aggregation")
    draft.set("algorithm.loss_aggregation", "seq-mean-token-mean", source="clip_mode", is_finer=True)
    if given not in (None, "seq-mean-token-mean"):
        draft.notes.append(
            f"loss_agg_mode={given!r} has no effect: clip_mode='gspo-one-side' uses seq-mean-token-mean, as in "
            "Trinity-RFT"
        )


def _resolve_chord(draft: Draft) -> None:
    """In Trinity-RFT, mu is `mu_valley` once the decay is over; a decay of 0 steps is over at once."""
    terms = draft.open_section("algorithm", "terms_args")
    peak, valley = terms.get("mu_peak", DEFAULT_MU), terms.get("mu_valley", DEFAULT_MU)
    if terms.get("mu_decay_steps") or peak == valley:
        return
    key = "algorithm.policy_loss_fn_args.mu_decay_steps=0"
    if terms.get("mu_warmup_steps"):
        terms["mu_decay_steps"] = 1
        draft.notes.append(
            f"{key}: mu falls from mu_peak to mu_valley one step after the warm-up; in Trinity-RFT it falls when the "
            "warm-up ends"
        )
    else:
        terms["mu_peak"] = valley
        draft.notes.append(f"{key}: mu is mu_valley={valley} from step 1, as in Trinity-RFT; mu_peak has no effect")


def _note_aggregation(draft: Draft, name: str) -> None:
    from tunesmith.algorithms.table import ALGORITHMS  # imports torch, which run files of our own do without

    own = ALGORITHMS[name].aggregation if name in ALGORITHMS else "token-mean"
    given = draft.open_section("algorithm").get("loss_aggregation")
    if given is None and own not in ("token-mean", "sum"):
        draft.notes.append(
            f"loss_agg_mode is not set: {name} uses {own}, as in its paper; Trinity-RFT uses token-mean; {SEQUENCES}"
        )
    elif given == "seq-mean-token-sum-norm":
        draft.notes.append(
            f"loss_agg_mode={given!r}: the sum over tokens is divided by the number of sequences and by "
            f"model.max_model_len; Trinity-RFT divides it only by the longest answer of the micro-batch; {SEQUENCES}"
        )
    elif str(given).startswith("seq-mean"):
        draft.notes.append(f"loss_agg_mode={given!r}: {SEQUENCES}")


def _note_defaults(draft: Draft) -> None:
    """One note on all defaults that differ, and one on a second run of the same name."""
    differing = [
        f"{key} is {ours} (Trinity-RFT: {theirs})"
        for key, (ours, theirs) in DIFFERENT_DEFAULTS.items()
        if ours != theirs and draft.find(key) is None and draft.find(key.partition(".")[0]) is not None
    ]
    names_kl = any(draft.find(f"algorithm.{key}") is not None for key in ("kl_loss_fn", "kl_loss_fn_args"))
    if draft.find("algorithm") is not None and not names_kl and find_algorithm(draft) not in WITHOUT_KL:
        differing.append(
            f"algorithm.kl_loss_fn is none (Trinity-RFT: k2 with kl_coef {DEFAULT_KL_COEF}, and a reference model)"
        )
    if differing:
        draft.notes.append("keys that are not set have other defaults than in Trinity-RFT: " + "; ".join(differing))
    if draft.find("name") is not None and not draft.find("continue_from_checkpoint"):
        theirs = "resumes it" if draft.find("continue_from_checkpoint") is None else "gives it a new name"
        draft.notes.append(
            "a second run of this name is refused, so that the first is not overwritten (Trinity-RFT "
            f"{theirs}): resume with --resume or continue_from_checkpoint: true"
        )


def _note_selectors(draft: Draft) -> None:
    """Notes on the task selectors of training sets; an evaluation runs every task."""
    train = "train_dataset"
    sets = {train: draft.values[train]} if train in draft.values else draft.values.get("train_datasets", {})
    for name, section in sets.items():
        selector = section.get("task_selector", {})
        kind = selector.get("selector_type")
        where = "the training set" if name == train else f"training set {name!r}"
        if kind is None:
            draft.notes.append(
                f"{where} has no task_selector: tasks are shuffled in each epoch; Trinity-RFT takes them in the order "
                "of the file (selector_type: sequential)"
            )
        elif kind == "random" and not read_mapping(selector.get("args"), "kwargs").get("replace"):
            draft.notes.append(
                f"{where}: selector random draws each batch without replacement, independently of other batches; "
                "kwargs: {replace: true} draws with replacement"
            )
