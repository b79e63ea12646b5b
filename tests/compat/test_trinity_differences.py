"""A file has the same meaning as in Trinity-RFT, or a note explains the difference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.losses.policy import compute_mix_losses, compute_mu
from tunesmith.algorithms.scores import TokenInputs, TokenScores
from tunesmith.compat.trinity_algorithms import DIFFERENT_DEFAULTS
from tunesmith.compat.trinity_yaml import translate_trinity_file
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_component


def translate(**values):
    """Our config and the notes, for a file with a model section and `values`."""
    translation = translate_trinity_file({"model": {"model_path": "m"}} | values)
    return build_section(RunConfig, translation.values), translation.notes


def translate_algorithm(name, **keys):
    config, notes = translate(algorithm={"algorithm_type": name} | keys)
    return config.algorithm, [note for note in notes if not note.startswith("keys that are not set ")]


@pytest.mark.parametrize("keys", [{}, {"loss_agg_mode": "token-mean"}])
def test_gspo_one_side_of_rec_sets_the_aggregation(keys):
    section, notes = translate_algorithm("rec", policy_loss_fn_args={"clip_mode": "gspo-one-side"}, **keys)
    assert resolve_algorithm(section).aggregation == "seq-mean-token-mean"
    assert any("loss_agg_mode='token-mean' has no effect" in note for note in notes) == bool(keys)
    other, _ = translate_algorithm("rec", policy_loss_fn_args={"clip_mode": "one-side"}, **keys)
    assert resolve_algorithm(other).aggregation == "token-mean"


def their_mu(step, *, peak, valley, warmup, decay):
    if step < warmup:
        return step / warmup * peak
    if step >= warmup + decay:
        return valley
    return (peak - valley) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay)) + valley


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("decay", [None, 0, 1, 4])
@pytest.mark.parametrize("peak", [None, 0.1, 0.9])
def test_mu_follows_trinitys_schedule(warmup, decay, peak):
    given = {"mu_warmup_steps": warmup, "mu_decay_steps": decay, "mu_peak": peak}
    section, notes = translate_algorithm("mix_chord", policy_loss_fn_args=given)
    terms = {"mu_peak": 0.1, "mu_valley": 0.1, "mu_warmup_steps": 0, "mu_decay_steps": 0} | section.terms_args
    ours = [
        compute_mu(
            step, peak=terms["mu_peak"], valley=terms["mu_valley"], num_warmup_steps=terms["mu_warmup_steps"],
            num_decay_steps=terms["mu_decay_steps"],
        )
        for step in range(10)
    ]  # fmt: skip
    theirs = [their_mu(step, peak=peak or 0.1, valley=0.1, warmup=warmup, decay=decay or 0) for step in range(10)]
    is_late = warmup > 0 and not decay and peak == 0.9
    if is_late:
        assert ours.pop(warmup) == 0.9 and theirs.pop(warmup) == 0.1
    assert ours == pytest.approx(theirs)
    assert sum("mu_decay_steps=0" in note for note in notes) == (not decay and peak == 0.9)
    assert any("one step after the warm-up" in note for note in notes) == is_late


def test_batch_sizes_of_mixture_losses_are_not_needed():
    sizes = {"train_batch_size_usual": 192, "train_batch_size_expert": 64, "ppo_mini_batch_size": 256}
    expert = {"auxiliary_buffers": {"sft_dataset": {"path": "data/experts"}}}
    for name in ("mix", "mix_chord"):
        config, notes = translate(
            algorithm={"algorithm_type": name, "policy_loss_fn_args": sizes}, buffer={"trainer_input": expert}
        )
        resolve_algorithm(config.algorithm)
        assert any("averaged separately" in note for note in notes)


def test_the_parts_of_a_mixture_have_one_aggregation():
    for name in ("mix", "mix_chord"):
        for modes, own in (
            ({"sft_loss_agg_mode": "token-mean"}, None),
            ({"loss_agg_mode": "seq-mean-token-mean"}, "seq-mean-token-mean"),
            (dict.fromkeys(["sft_loss_agg_mode", "grpo_loss_agg_mode"], "seq-mean-token-sum"), "seq-mean-token-sum"),
        ):
            section, _ = translate_algorithm(name, policy_loss_fn_args=modes)
            assert (section.loss_aggregation or "token-mean") == (own or "token-mean") and not section.loss_args
        with pytest.raises(ConfigError, match="grpo_loss_agg_mode and sft_loss_agg_mode must be equal"):
            translate_algorithm(name, policy_loss_fn_args={"sft_loss_agg_mode": "seq-mean-token-mean"})


@pytest.mark.parametrize(("has_phi", "loss"), [(None, None), (True, None), (False, compute_mix_losses)])
def test_without_phi_mix_chord_has_the_loss_of_mix(has_phi, loss):
    section, _ = translate_algorithm("mix_chord", policy_loss_fn_args={"enable_phi_function": has_phi})
    assert not section.loss_args
    assert (section.loss and load_component(section.loss, knob="algorithm.loss")) is loss


def test_the_weight_of_the_teacher_in_jsd_is_beta():
    section, notes = translate_algorithm("jsd", advantage_fn_args={"lambda_coef": 0.3, "kl_coef": 2.0})
    assert section.terms_args == {"kl_coef": 2.0, "beta": 0.3} and not section.advantage_args
    assert any("Trinity-RFT's is negative for none" in note for note in notes)


def test_topr_uses_token_level_ratios():
    section, _ = translate_algorithm("topr", policy_loss_fn_args={"advantage_threshold": 0.5})
    algorithm = resolve_algorithm(section)
    log_ratio = np.array([-1.0, 0.5, -0.2])
    scores = TokenInputs(
        old_logprobs_E=np.full(3, -2.0), logprobs_E=np.full(3, -2.0) + log_ratio, advantages_E=np.full(3, 0.4),
        sequence_E=np.zeros(3, dtype=int), group_E=np.zeros(3, dtype=int),
    )  # fmt: skip
    assert algorithm.compute_terms(scores).correction_E == pytest.approx(np.minimum(np.exp(log_ratio), 1.0))


@pytest.mark.parametrize(("args", "gamma"), [({}, 1.0), ({"gamma": 0.9}, 0.9), ({"omega": 0.5}, 1.0)])
def test_gigpo_does_not_discount_unless_gamma_is_set(args, gamma):
    section, notes = translate_algorithm("gigpo", advantage_fn_args=args)
    assert section.advantage_args == args | {"gamma": gamma}
    assert any("env_state_hash" in note for note in notes)


def test_the_note_on_sapo_gives_both_gradients():
    section, notes = translate_algorithm("sapo")
    logprobs = torch.full((2,), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    scores = TokenScores(logprobs_N=logprobs, old_logprobs_N=logprobs.detach(), advantages_N=advantages)
    resolve_algorithm(section).compute_losses(scores).losses_N.sum().backward()
    assert (-logprobs.grad / advantages).tolist() == pytest.approx([1.0, 1.0])
    theirs = [4 / tau * 0.5 for tau in (1.0, 1.05)]
    assert any(f"it is {theirs[0]:g} for A > 0 and {theirs[1]:.1f} for A <= 0" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("gspo", None, "gspo uses seq-mean-token-mean, as in its paper; Trinity-RFT uses token-mean"),
        ("rloo", None, "rloo uses seq-mean-token-sum, as in its paper; Trinity-RFT uses token-mean"),
        ("gspo", "token-mean", None),
        ("grpo", None, None),
        ("grpo", "seq-mean-token-sum-norm", "by the number of sequences and by model.max_model_len"),
        ("grpo", "seq-mean-token-mean", "a sequence is a whole rollout"),
        ("dpo", None, None),
    ],
)
def test_aggregations_that_weight_tokens_differently_are_noted(name, mode, words):
    _, notes = translate_algorithm(name, loss_agg_mode=mode)
    assert [words in note for note in notes] == ([] if words is None else [True])


FULL = {
    "algorithm": {
        "algorithm_type": "grpo",
        "repeat_times": 4,
        "optimizer": {"weight_decay": 0.0},
        "kl_loss_fn": "none",
    },
    "buffer": {"batch_size": 4},
    "explorer": {"max_timeout": 60, "max_retry_times": 0, "eval_on_startup": False},
    "trainer": {"save_interval": 10},
}


def test_a_file_that_sets_every_key_has_no_note():
    assert translate(**FULL)[1] == ()
    assert translate_trinity_file({"synchronizer": {"sync_style": "fixed"}}).notes == ()


def test_what_a_conversation_without_the_prefix_cache_costs_is_a_note():
    for value in (True, False):
        config, notes = translate(explorer={"rollout_model": {"enable_prefix_caching": value}})
        assert config.engine.has_prefix_cache is value
        assert any("enable_prefix_caching=False: each call of an agent" in note for note in notes) is not value


@pytest.mark.parametrize("key", DIFFERENT_DEFAULTS)
def test_a_different_default_is_noted_if_the_key_is_not_set(key):
    values = {section: dict(keys) for section, keys in FULL.items()}
    if key == "algorithm.optimizer.weight_decay":
        values["algorithm"]["optimizer"] = {}
    else:
        section, _, name = key.partition(".")
        del values[section][name]
    ours, theirs = DIFFERENT_DEFAULTS[key]
    (note,) = translate(**values)[1]
    expected = "keys that are not set have other defaults than in Trinity-RFT"
    assert note == f"{expected}: {key} is {ours} (Trinity-RFT: {theirs})"


@pytest.mark.parametrize(("name", "has_note"), [("grpo", True), ("gspo", True), ("dapo", False), ("sppo", False)])
def test_no_kl_by_default_is_noted_if_trinity_has_one(name, has_note):
    algorithm = {key: value for key, value in FULL["algorithm"].items() if key != "kl_loss_fn"}
    _, notes = translate(**FULL | {"algorithm": algorithm | {"algorithm_type": name, "loss_agg_mode": "token-mean"}})
    assert any("kl_loss_fn is none (Trinity-RFT: k2 with kl_coef 0.001" in note for note in notes) == has_note
    args = {"algorithm_type": name, "loss_agg_mode": "token-mean", "kl_loss_fn_args": {"kl_coef": 0.1}}
    assert translate(**FULL | {"algorithm": algorithm | args})[1] == ()


@pytest.mark.parametrize(
    ("value", "words"), [(None, "Trinity-RFT resumes it"), (False, "Trinity-RFT gives it a new name"), (True, None)]
)
def test_a_second_run_of_a_name_is_noted(value, words):
    _, notes = translate(**FULL, name="n", continue_from_checkpoint=value)
    assert [("--resume" in note and words in note) for note in notes] == ([] if words is None else [True])


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (None, "has no task_selector: tasks are shuffled"),
        ({}, "has no task_selector: tasks are shuffled"),
        ({"selector_type": "random"}, "random draws each batch without replacement"),
        ({"selector_type": "random", "kwargs": {"replace": True}}, None),
        ({"selector_type": "sequential"}, None),
    ],
)
def test_differences_in_the_order_of_tasks_are_noted(selector, words):
    sets = {"path": "d"} if selector is None else {"path": "d", "task_selector": selector}
    _, notes = translate(**FULL | {"buffer": {"batch_size": 4, "explorer_input": {"taskset": sets}}})
    assert [words in note for note in notes] == ([] if words is None else [True])
    several = {
        "tasksets": [{"name": "a", **sets}, {"name": "b", "path": "e", "task_selector": {"selector_type": "shuffle"}}]
    }
    _, notes = translate(**FULL | {"buffer": {"batch_size": 4, "explorer_input": several}})
    assert ["training set 'a'" in note for note in notes] == ([] if words is None else [True])
