"""DPO, its forms and KTO in float64 against autograd of the textbook losses, and against TRL on the same numbers."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from token_batches import build_scores
from tunesmith.algorithms.losses.preference import compute_dpo_terms, compute_kto_terms, compute_preference_losses
from tunesmith.algorithms.scores import TokenScores

LENGTHS = [3, 1, 4, 2, 5, 2]
DPO_LABELS, DPO_GROUPS = [1, -1, -1, 1, 1, -1], [0, 0, 1, 1, 2, 2]
KTO_LABELS = [1, -1, -1, 1, 0, 0]


def draw(seed: int = 0, scale: float = 3.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprobs of each sequence's tokens under the policy, which take gradients, and under the reference."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (
        [-scale * torch.rand(length, generator=generator, dtype=torch.float64) for length in LENGTHS] for _ in range(2)
    )
    return [row.requires_grad_() for row in policy], reference


def run_ours(compute_terms, policy, reference, labels, groups=None, **args) -> tuple[float, torch.Tensor, dict]:
    """The loss, its gradient by each token's logprob, and the metrics."""
    scores = build_scores(
        [[label] * len(row) for label, row in zip(labels, policy, strict=True)],
        groups=groups,
        logprobs=[row.tolist() for row in policy],
        reference_logprobs=[row.tolist() for row in reference],
    )
    terms = compute_terms(scores, **args)
    losses, logprobs = compute_token_losses(terms, policy)
    assert terms.correction_E is None
    loss = losses.sum()
    loss.backward()
    return loss.item(), logprobs.grad, terms.metrics


def compute_token_losses(terms, policy) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token, and the logprobs that take its gradient."""
    logprobs = torch.cat([row.detach() for row in policy]).requires_grad_()
    losses = compute_preference_losses(
        TokenScores(
            logprobs_N=logprobs,
            old_logprobs_N=torch.zeros_like(logprobs),
            advantages_N=torch.from_numpy(terms.advantages_E),
            constants_N=torch.from_numpy(terms.constants_E),
        )
    )
    return losses.losses_N, logprobs


def differentiate(policy, loss: torch.Tensor) -> tuple[float, torch.Tensor]:
    gradients = torch.autograd.grad(loss, policy, allow_unused=True)
    filled = [torch.zeros_like(row) if g is None else g for row, g in zip(policy, gradients, strict=True)]
    return loss.item(), torch.cat(filled)


def compute_gaps(policy, reference, labels, groups, *, has_length_norm=False) -> torch.Tensor:
    """Implicit reward of the chosen minus that of the rejected completion of each pair."""
    gaps = []
    for group in dict.fromkeys(groups):
        gap = 0.0
        for row, ref, label, of_group in zip(policy, reference, labels, groups, strict=True):
            if of_group == group:
                gap = gap + label * (row.sum() - ref.sum()) / (len(row) if has_length_norm else 1)
        gaps.append(gap)
    return torch.stack(gaps)


def compute_dpo_reference(policy, reference, labels, groups, beta) -> torch.Tensor:
    return -functional.logsigmoid(beta * compute_gaps(policy, reference, labels, groups)).mean()


TEXTBOOK = {
    "conservative": lambda d, beta: -0.7 * functional.logsigmoid(beta * d) - 0.3 * functional.logsigmoid(-beta * d),
    "robust": lambda d, beta: (-0.7 * functional.logsigmoid(beta * d) + 0.3 * functional.logsigmoid(-beta * d)) / 0.4,
    "hinge": lambda d, beta: (1 - beta * d).clamp(min=0),
    "ipo": lambda d, beta: (d - 1 / (2 * beta)) ** 2,
}
FORMS = {
    "conservative": {"label_smoothing": 0.3},
    "robust": {"loss_type": "robust", "label_smoothing": 0.3},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
}


def compute_kto_reference(policy, reference, labels, beta, desirable, undesirable) -> torch.Tensor:
    rewards = [row.sum() - ref.sum() for row, ref in zip(policy, reference, strict=True)]
    probes = [reward.detach() for reward, label in zip(rewards, labels, strict=True) if label == 0]
    z = torch.stack(probes).mean().clamp(min=0) if probes else torch.zeros(())
    losses = []
    for reward, label in zip(rewards, labels, strict=True):
        if label == 1:
            losses.append(desirable * (1 - torch.sigmoid(beta * (reward - z))))
        if label == -1:
            losses.append(undesirable * (1 - torch.sigmoid(beta * (z - reward))))
    return torch.stack(losses).mean()


def assert_same(ours, theirs) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", [0.1, 0.5, 3.0])
def test_dpo_equals_autograd_of_the_textbook(beta):
    policy, reference = draw()
    ours = run_ours(compute_dpo_terms, policy, reference, DPO_LABELS, DPO_GROUPS, beta=beta)
    assert_same(ours, differentiate(policy, compute_dpo_reference(policy, reference, DPO_LABELS, DPO_GROUPS, beta)))


@pytest.mark.parametrize("has_length_norm", [False, True])
@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("form", FORMS)
def test_dpo_forms_equal_autograd_of_the_textbook(form, beta, has_length_norm):
    policy, reference = draw(2)
    args = {**FORMS[form], "beta": beta, "has_length_norm": has_length_norm}
    ours = run_ours(compute_dpo_terms, policy, reference, DPO_LABELS, DPO_GROUPS, **args)
    gaps = compute_gaps(policy, reference, DPO_LABELS, DPO_GROUPS, has_length_norm=has_length_norm)
    assert_same(ours, differentiate(policy, TEXTBOOK[form](gaps, beta).mean()))
    assert ours[2]["preference/margin"] == pytest.approx(beta * gaps.mean().item())


def test_robust_dpo_is_unbiased_under_swapped_labels():
    """With 30 % of the labels swapped, the expected loss and gradient are those of DPO on the true labels."""
    policy, reference = draw(1)
    swapped = [-label for label in DPO_LABELS]
    args = {"loss_type": "robust", "label_smoothing": 0.3}
    kept, flipped = (
        run_ours(compute_dpo_terms, policy, reference, labels, DPO_GROUPS, **args) for labels in (DPO_LABELS, swapped)
    )
    true = run_ours(compute_dpo_terms, policy, reference, DPO_LABELS, DPO_GROUPS)
    assert 0.7 * kept[0] + 0.3 * flipped[0] == pytest.approx(true[0])
    torch.testing.assert_close(0.7 * kept[1] + 0.3 * flipped[1], true[1])


def test_hinge_and_ipo_have_no_gradient_at_their_optimum():
    """Hinge beyond the margin 1 / beta, ipo at a gap of 1 / (2 beta)."""
    policy = [torch.tensor([value], dtype=torch.float64) for value in (0.0, -5.0, 0.0, -10.5)]
    reference = [torch.zeros(1, dtype=torch.float64)] * 4
    labels, groups = [1, -1, 1, -1], [0, 0, 1, 1]
    ipo = run_ours(compute_dpo_terms, policy, reference, labels, groups, loss_type="ipo")[1].tolist()
    assert ipo == pytest.approx([0, 0, 5.5, -5.5])  # pushed back from 10.5 to 5
    hinge = run_ours(compute_dpo_terms, policy, reference, labels, groups, loss_type="hinge")[1].tolist()
    assert hinge == pytest.approx([-0.05, 0.05, 0, 0])


@pytest.mark.parametrize("form", FORMS)
def test_dpo_forms_are_finite_for_extreme_margins_and_empty_updates(form):
    policy = [torch.tensor([value], dtype=torch.float64) for value in (-1e5, 0.0, 0.0, -1e5)]
    reference = [torch.zeros(1, dtype=torch.float64)] * 4
    loss, gradient, _ = run_ours(compute_dpo_terms, policy, reference, [1, -1, 1, -1], [0, 0, 1, 1], **FORMS[form])
    assert np.isfinite(loss) and gradient.isfinite().all()
    loss, gradient, metrics = run_ours(compute_dpo_terms, policy[:1], reference[:1], [1], [0], **FORMS[form])
    assert (loss, gradient.abs().sum(), metrics) == (0, 0, {"preference/num_pairs": 0.0})
    assert run_ours(compute_dpo_terms, [torch.zeros(0)], [torch.zeros(0)], [1], **FORMS[form])[0] == 0


def test_dpo_is_a_mean_over_pairs():
    """Two pairs whose margins are 1 and -1 give 0.6944; one logsigmoid of their sum would give 0.6931."""
    policy = [torch.tensor([value], dtype=torch.float64) for value in (-1.0, -2.0, -2.0, -1.0)]
    reference = [torch.tensor([-1.0], dtype=torch.float64)] * 4
    loss, _, metrics = run_ours(compute_dpo_terms, policy, reference, [1, -1, 1, -1], [0, 0, 1, 1])
    assert loss == pytest.approx(0.6944, abs=5e-5)
    assert metrics == {
        "preference/num_pairs": 2.0,
        "preference/accuracy": 0.5,
        "preference/margin": pytest.approx(0.0),
        "preference/chosen_reward": pytest.approx(-0.05),
        "preference/rejected_reward": pytest.approx(-0.05),
    }


def test_dpo_of_the_reference_is_log_two():
    policy, _ = draw()
    reference = [row.detach() for row in policy]
    loss, gradient, metrics = run_ours(compute_dpo_terms, policy, reference, DPO_LABELS, DPO_GROUPS)
    assert loss == pytest.approx(np.log(2))
    expected = torch.cat([torch.full((n,), -label * 0.05 / 3) for n, label in zip(LENGTHS, DPO_LABELS, strict=True)])
    torch.testing.assert_close(gradient, expected.double())
    assert metrics["preference/accuracy"] == 0


def test_dpo_does_not_train_completions_without_partner():
    policy, reference = draw()
    alone = run_ours(compute_dpo_terms, policy, reference, DPO_LABELS, [0, 0, 1, 2, 3, 4])
    pair = run_ours(compute_dpo_terms, policy[:2], reference[:2], DPO_LABELS[:2], [0, 0])
    assert alone[0] == pytest.approx(pair[0])
    torch.testing.assert_close(alone[1][:4], pair[1])
    assert alone[1][4:].abs().max() == 0
    assert alone[2]["preference/num_pairs"] == 1
    loss, gradient, metrics = run_ours(compute_dpo_terms, policy[:1], reference[:1], [1], [0])
    assert (loss, gradient.abs().sum(), metrics) == (0, 0, {"preference/num_pairs": 0.0})


def test_dpo_is_finite_for_extreme_margins():
    policy = [torch.tensor([value], dtype=torch.float64) for value in (-1e5, 0.0, 0.0, -1e5)]
    reference = [torch.zeros(1, dtype=torch.float64)] * 4
    loss, gradient, _ = run_ours(compute_dpo_terms, policy, reference, [1, -1, 1, -1], [0, 0, 1, 1], beta=1.0)
    assert loss == pytest.approx(5e4)
    assert gradient.tolist() == [-0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 1.3)])
def test_kto_equals_autograd_of_the_textbook(seed, weights):
    policy, reference = draw(seed)
    args = {"beta": 0.4, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    ours = run_ours(compute_kto_terms, policy, reference, KTO_LABELS, **args)
    assert_same(ours, differentiate(policy, compute_kto_reference(policy, reference, KTO_LABELS, 0.4, *weights)))


def test_kto_reference_point_is_clamped_at_zero():
    points = [
        run_ours(compute_kto_terms, *draw(seed), KTO_LABELS)[2]["preference/reference_point"] for seed in range(4)
    ]
    assert min(points) == 0 < max(points)


def test_kto_reference_point_is_zero_without_probes():
    policy, reference = (rows[:4] for rows in draw())
    ours = run_ours(compute_kto_terms, policy, reference, KTO_LABELS[:4])
    assert ours[2]["preference/reference_point"] == 0
    assert_same(ours, differentiate(policy, compute_kto_reference(policy, reference, KTO_LABELS[:4], 0.1, 1.0, 1.0)))


def test_kto_with_probes_only_has_no_gradient():
    policy, reference = draw()
    loss, gradient, _ = run_ours(compute_kto_terms, policy, reference, [0] * 6)
    assert (loss, gradient.abs().sum()) == (0, 0)


@pytest.mark.parametrize("compute", [compute_dpo_terms, compute_kto_terms])
def test_empty_update(compute):
    assert run_ours(lambda scores: compute(scores), [torch.zeros(0)], [torch.zeros(0)], [1])[0] == 0


class PeerTrainer(SimpleNamespace):
    """The attributes of the trainer that TRL's loss functions read, for one process."""

    def __init__(self, **settings) -> None:
        accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
        super().__init__(
            model=SimpleNamespace(training=True),
            accelerator=accelerator,
            aux_loss_enabled=False,
            precompute_ref_logps=True,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            **settings,
        )


def pad(rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Token logprobs [B, T], and the mask [B, 1 + T] of the ids that they belong to."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    return padded, functional.pad(mask, (1, 0)).long()


def answer_with(rows) -> SimpleNamespace:
    padded, _ = pad(rows)
    zeros = torch.zeros_like(padded)
    return SimpleNamespace(log_probs=padded, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


@pytest.mark.parametrize(
    ("loss_type", "args"),
    [
        ("sigmoid", {}),
        ("hinge", {"loss_type": "hinge"}),
        ("robust", {"loss_type": "robust", "label_smoothing": 0.2}),
        ("ipo", {"loss_type": "ipo", "has_length_norm": True}),
        ("sigmoid_norm", {"has_length_norm": True}),
    ],
)
def test_dpo_equals_trl(loss_type, args):
    peer = pytest.importorskip("trl.trainer.dpo_trainer")
    policy, reference = draw()
    chosen, rejected = [0, 3, 4], [1, 2, 5]
    order = chosen + rejected
    mask = pad([policy[i] for i in order])[1]
    settings = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "beta": 0.3, "use_weighting": False}
    settings["label_smoothing"] = args.get("label_smoothing", 0.0)
    trainer = PeerTrainer(loss_types=[loss_type], loss_weights=[1.0], **settings)
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": torch.stack([reference[i].sum() for i in chosen]),
        "ref_rejected_logps": torch.stack([reference[i].sum() for i in rejected]),
    }
    loss = peer.DPOTrainer._compute_loss(
        trainer, lambda **_: answer_with([policy[i] for i in order]), inputs, return_outputs=False
    )
    ours = run_ours(compute_dpo_terms, policy, reference, DPO_LABELS, DPO_GROUPS, beta=0.3, **args)
    assert_same(ours, differentiate(policy, loss))
    if not args.get("has_length_norm"):  # TRL's metrics are of the summed rewards
        assert trainer._metrics["train"]["rewards/margins"] == [pytest.approx(ours[2]["preference/margin"])]


@pytest.mark.parametrize("seed", range(3))
def test_kto_equals_trl(seed):
    peer = pytest.importorskip("trl.trainer.kto_trainer")
    policy, reference = draw(seed)
    labeled, probes = [0, 1, 2, 3], [4, 5]
    mask, probe_mask = pad([policy[i] for i in labeled])[1], pad([policy[i] for i in probes])[1]
    trainer = PeerTrainer(calculate_KL=True, loss_type="kto", beta=0.3, desirable_weight=0.8, undesirable_weight=1.2)
    trainer._compute_kl_logps = lambda *_: torch.stack([policy[i].sum() for i in probes])
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "KL_completion_mask": probe_mask,
        "label": torch.tensor([label == 1 for label in KTO_LABELS[:4]]),
        "ref_logps": torch.stack([reference[i].sum() for i in labeled]),
        "ref_KL_logps": torch.stack([reference[i].sum() for i in probes]),
    }
    loss = peer.KTOTrainer._compute_loss(
        trainer, lambda **_: answer_with([policy[i] for i in labeled]), inputs, return_outputs=False
    )
    ours = run_ours(
        compute_kto_terms, policy, reference, KTO_LABELS, beta=0.3, desirable_weight=0.8, undesirable_weight=1.2
    )
    assert_same(ours, differentiate(policy, loss))
