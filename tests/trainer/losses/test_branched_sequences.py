"""Quantities per sequence against sums over the turns of whole rollouts, with branches (soft credit) and retries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection
from tunesmith.experience.samples import build_samples
from tunesmith.trainer.loss_pass import PassSetup
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import scatter_to_samples, score_tokens
from tunesmith.trainer.update import StepScores, prepare_update
from tunesmith.types import Distribution, Group, Task, Trajectory, Turn

TASK = Task(task_id="t/0", index=0, row={})
ADVANTAGES = [-0.5, 1.0, -1.5, -0.25, 0.75]
PACKINGS = [{"max_tokens_per_row": 10_000}, {"max_tokens_per_row": 12}, {"has_prefix_sharing": False}]


def build_turn(rng: np.random.Generator, prompt: Sequence[int]) -> Turn:
    sampled = rng.integers(1, 97, size=rng.integers(1, 5)).tolist()
    return Turn(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=tuple((-4.5 + 0.2 * rng.standard_normal(len(sampled))).tolist()),
        policy_versions=(0,) * len(sampled),
        distribution=Distribution(),
        stop_reason="eos",
    )


def build_runs() -> list[Trajectory]:
    """0 starts from the task, 1 branches from 0 and 2 from 1, 3 starts from the task and retries its first call."""
    rng = np.random.default_rng(3)
    runs: list[Trajectory] = []
    for index, (parent, num_shared) in enumerate([(None, 0), (0, 2), (1, 1), (None, 0), (2, 3)]):
        turns = [] if parent is None else list(runs[parent].turns[:num_shared])
        while len(turns) < 4:
            prompt = (*turns[-1].prompt_ids, *turns[-1].sampled_ids, 9, len(turns)) if turns else (5, 6, 7)
            turns.append(build_turn(rng, (5, 6, 7) if index == 3 and len(turns) == 1 else prompt))
        owners = () if parent is None else (runs[parent].turn_owners + (parent,) * 4)[:num_shared]
        branch_at = None if parent is None else len(turns[num_shared].prompt_ids)
        runs.append(
            Trajectory(
                task=TASK, run_index=index, turns=tuple(turns), reward=0.0, parent=parent, branch_at=branch_at,
                turn_owners=owners,
            )
        )  # fmt: skip
    return runs


@torch.no_grad()
def score_run(model, run: Trajectory) -> np.ndarray:
    """The logprobs of all tokens that the rollout sampled, each turn on its own."""
    found = []
    for turn in run.turns:
        logits = model(input_ids=torch.tensor([[*turn.prompt_ids, *turn.sampled_ids]])).logits[0]
        rows = logits[len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
        found += [row[token].item() for row, token in zip(rows, turn.sampled_ids, strict=True)]
    return np.array(found)


class Scored:
    """Logprobs of a rollout's tokens under the policy, the proximal policy and the sampler."""

    def __init__(self, run: Trajectory, advantage: float) -> None:
        self.policy, self.proximal = score_run(build_trainable(), run), score_run(build_trainable(seed=1), run)
        self.sampler = np.concatenate([turn.logprobs for turn in run.turns])
        self.advantage, self.length = advantage, len(self.sampler)

    @property
    def proximal_sum(self) -> float:
        return float((self.proximal - self.sampler).sum())

    @property
    def is_off_policy(self) -> bool:
        return self.advantage < 0 and float((self.sampler - self.policy).mean()) > 0.1


SEQUENCE_MASK = {"level": "sequence", "low": 0.2, "high": 5.0}
GEOMETRIC_MASK = {"level": "geometric", "low": 0.95, "high": 1.05}
CASES: dict[str, tuple[dict, str, Callable[[Scored], float]]] = {
    "ratios of gspo": (
        {"algorithm_type": "gspo", "correction": {"importance": "none"}},
        "sequence_log_ratios_E",
        lambda run: float((run.policy - run.sampler).mean()),
    ),
    "importance weights": (
        {"correction": {"importance": "sequence", "cap": 100.0}},
        "correction_E",
        lambda run: min(math.exp(run.proximal_sum), 100.0),
    ),
    "mask of products": (
        {"correction": {"importance": "none", "mask": SEQUENCE_MASK}},
        "correction_E",
        lambda run: float(0.2 <= math.exp(run.proximal_sum) <= 5.0),
    ),
    "mask of means": (
        {"correction": {"importance": "none", "mask": GEOMETRIC_MASK}},
        "correction_E",
        lambda run: float(0.95 <= math.exp(run.proximal_sum / run.length) <= 1.05),
    ),
    "negative sequences": (
        {"correction": {"importance": "none", "negative_sequence_delta": 0.1}},
        "correction_E",
        lambda run: float(not run.is_off_policy),
    ),
    "means": (
        {"loss_aggregation": "seq-mean-token-mean", "correction": {"importance": "none"}},
        "weights_E",
        lambda run: 1 / (5 * run.length),
    ),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_per_sequence_is_over_all_turns_of_a_rollout(case, packing):
    section, name, compute = CASES[case]
    model, algorithm = build_trainable(), resolve_algorithm(AlgorithmSection(**section))
    runs = build_runs()
    samples, _ = build_samples([Group(task=TASK, trajectories=tuple(runs))], [ADVANTAGES])
    assert len(samples) > len(runs)
    rows = pack_samples(
        samples, hidden_size=32, **{"max_tokens_per_row": 10_000, "has_prefix_sharing": True, **packing}
    )
    logprobs = score_tokens(build_trainable(seed=1), samples, rows, chunk_tokens=100)[0]
    proximal = StepScores(
        columns={"proximal_logprobs_E": scatter_to_samples(logprobs, samples, rows)},
        is_weighted=algorithm.section.correction.importance == "sequence",
    )
    inputs = prepare_update(
        PassSetup(model=model, norm_length=40, chunk_tokens=100), algorithm, samples, rows, scores=proximal
    ).inputs
    trajectory_R = np.array([samples[index].trajectory_index for row in rows for index in row.sample_E.tolist()])
    expected = [compute(Scored(run, advantage)) for run, advantage in zip(runs, ADVANTAGES, strict=True)]
    assert len(set(expected)) > 1
    assert len(trajectory_R) == sum(len(turn.sampled_ids) for run in runs for turn in run.turns)
    np.testing.assert_allclose(getattr(inputs, name), np.array(expected)[trajectory_R], rtol=1e-9)


def test_hard_credit_keeps_only_a_branchs_own_tokens_in_its_sequence():
    """Why quantities per sequence are refused with it: a branch has no scores of the turns that another one trains."""
    runs = build_runs()
    samples, _ = build_samples([Group(task=TASK, trajectories=tuple(runs))], [ADVANTAGES], has_hard_credit=True)
    trained = [sum(sum(each.is_sampled) for each in samples if each.trajectory_index == index) for index in range(5)]
    own = [sum(len(turn.sampled_ids) for turn in run.turns[run.num_shared_turns :]) for run in runs]
    assert trained == own
