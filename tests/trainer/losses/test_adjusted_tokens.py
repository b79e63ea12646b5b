"""Tokens sampled under penalties, bans and grammars are scored and trained under the same distribution."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, EngineSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import TrainingError
from tunesmith.experience.samples import build_samples
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.trainer.batch import attach_token_masks
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import scatter_to_samples, score_tokens
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Distribution, Group, Sample, Sampling, Task, Trajectory, Turn

TOKENIZER = build_pocket_tokenizer()
MODEL = build_pocket_model(TOKENIZER, hidden_size=96, num_layers=2)
use_plan_attention(MODEL)
PENALIZED = Distribution(
    temperature=0.8, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
    logit_bias=((300, 1.0),),
)  # fmt: skip
BANNED = Distribution(
    min_tokens=5, end_ids=(TOKENIZER.eos_token_id,),
    bad_words=((290,), (300, 301)), logit_bias=((290, 6.0), (300, 6.0)),
)  # fmt: skip
CHOICES = Distribution(grammar='start: "yes" | "no, not at all" | /[0-9]{3,9}/', temperature=1.3)


def build_engine() -> LocalEngine:
    return LocalEngine(MODEL, TOKENIZER, EngineSection(kv_cache_tokens=8000), max_model_len=400)


def sample_two_turns(engine: LocalEngine, distribution: Distribution, *, with_masks: bool = True) -> list[Sample]:
    """Runs of one task: a reply to one prompt, then a reply that extends it; the first run repeats the second."""

    async def run() -> list[Sample]:
        prompt = tuple(TOKENIZER.encode("How many apples does Ann have?"))
        trajectories = []
        for index in range(4):
            seed = max(index, 1)
            turns, prompt_ids = [], prompt
            for _ in range(2):
                sampling = Sampling(max_tokens=14, distribution=distribution, seed=seed, return_entropy=True)
                completion = await engine.generate(prompt_ids, sampling)
                turns.append(
                    Turn(
                        prompt_ids=prompt_ids,
                        sampled_ids=completion.sampled_ids,
                        logprobs=completion.logprobs,
                        policy_versions=completion.policy_versions,
                        distribution=distribution,
                        stop_reason=completion.stop_reason,
                        entropies=completion.entropies,
                    )
                )
                prompt_ids = (*prompt_ids, *completion.sampled_ids, 300, 301)
            trajectories.append(Trajectory(task=TASK, run_index=index, turns=tuple(turns), reward=float(index % 2)))
        group = Group(task=TASK, trajectories=tuple(trajectories))
        entropies.extend(each.turns for each in trajectories)
        return build_samples([group], [[-0.5, 0.5, 1.0, -1.0]])[0]

    entropies: list[tuple[Turn, ...]] = []
    samples = run_lockstep(run())
    RECORDED[distribution] = [[each for turn in turns for each in (turn.entropies or ())] for turns in entropies]
    return list(attach_token_masks(samples, engine.grammars)) if with_masks else samples


TASK = Task(task_id="t/0", index=0, row={})
RECORDED: dict[Distribution, list[list[float]]] = {}
"""Entropies that the sampler reported, per run."""


@pytest.mark.parametrize("distribution", [PENALIZED, BANNED, CHOICES], ids=["penalties", "bans", "grammar"])
def test_the_trainer_scores_the_distribution_that_was_sampled_from(distribution: Distribution) -> None:
    if distribution.grammar:
        pytest.importorskip("llguidance")
    samples = sample_two_turns(build_engine(), distribution)
    for packing in ({"max_tokens_per_row": 10_000, "has_prefix_sharing": True},
                    {"max_tokens_per_row": 60, "has_prefix_sharing": False}):  # fmt: skip
        rows = pack_samples(samples, hidden_size=96, **packing)
        logprobs_R, entropies_R = score_tokens(MODEL, samples, rows, chunk_tokens=5)
        scored = scatter_to_samples(logprobs_R, samples, rows)
        entropies = scatter_to_samples(entropies_R, samples, rows)
        for sample, ours, entropy, recorded in zip(samples, scored, entropies, RECORDED[distribution], strict=True):
            is_sampled = np.array(sample.is_sampled)
            assert is_sampled.sum() >= 4
            np.testing.assert_allclose(ours[is_sampled], np.array(sample.logprobs)[is_sampled], atol=1e-4)
            np.testing.assert_allclose(entropy[is_sampled], recorded, atol=1e-4)
    plain = [
        replace(sample, distribution_spans=tuple(
            replace(span, distribution=Distribution(temperature=distribution.temperature)) for span in spans
        ))
        for sample, spans in ((sample, sample.distribution_spans) for sample in samples)
    ]  # fmt: skip
    wrong = score_tokens(MODEL, plain, rows, chunk_tokens=5)[0]
    assert abs(wrong - logprobs_R).max() > 0.01


@pytest.mark.parametrize("distribution", [PENALIZED, CHOICES], ids=["penalties", "grammar"])
def test_gradients_are_those_of_the_logprobs_and_do_not_depend_on_packing(distribution: Distribution) -> None:
    if distribution.grammar:
        pytest.importorskip("llguidance")
    samples = sample_two_turns(build_engine(), replace(distribution, top_p=1.0))
    model = copy.deepcopy(MODEL).double()
    algorithm = resolve_algorithm(
        AlgorithmSection(algorithm_type="reinforce", entropy_coef=0.01, loss_aggregation="token-mean")
    )
    found = []
    for max_tokens, is_shared, chunk_tokens in ((10_000, True, 1000), (10_000, True, 3), (60, False, 7)):
        rows = pack_samples(samples, hidden_size=96, max_tokens_per_row=max_tokens, has_prefix_sharing=is_shared)
        setup = PassSetup(model=model, norm_length=100, chunk_tokens=chunk_tokens)
        prepared = prepare_update(setup, algorithm, samples, rows)
        totals = run_loss_pass(setup, algorithm, samples, rows, prepared.inputs)
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        found.append((totals["train/loss"][1].item(), gradient))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        assert (gradient - found[0][1]).norm() < 1e-5 * gradient.norm()  # norms are float32
    assert found[0][1].norm() > 1e-3
    expected = estimate_gradient(model, samples, algorithm)
    assert (found[0][1] - expected).norm() < 1e-5 * expected.norm()


def estimate_gradient(model, samples, algorithm) -> torch.Tensor:
    """The gradient of plain forwards of each sample, with adjusted logits written out token by token."""
    tokens = [(sample, time) for sample in samples for time in np.flatnonzero(sample.is_sampled).tolist()]
    loss = torch.zeros((), dtype=torch.float64)
    logits_of = {id(sample): model(input_ids=torch.tensor([sample.token_ids])).logits[0] for sample in samples}
    for sample, time in tokens:
        [span] = [span for span in sample.distribution_spans if span.start <= time < span.end]
        distribution, row = span.distribution, logits_of[id(sample)][time - 1].clone()
        for token_id, bias in distribution.logit_bias:
            row[token_id] = row[token_id] + bias
        output = list(sample.token_ids[span.start : time])
        for token_id in sorted(set(sample.token_ids[:time])) if distribution.repetition_penalty != 1 else []:
            penalty = distribution.repetition_penalty
            row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
        for token_id in set(output):
            row[token_id] = row[token_id] - distribution.presence_penalty
            row[token_id] = row[token_id] - distribution.frequency_penalty * output.count(token_id)
        if span.token_masks is not None:
            bits = np.unpackbits(np.frombuffer(span.token_masks[time - span.start], np.uint8), bitorder="little")
            row = row[torch.from_numpy(bits[: len(row)]).bool()]
            target = int(bits[: sample.token_ids[time]].sum())
        else:
            target = sample.token_ids[time]
        logprobs = (row / distribution.temperature).log_softmax(dim=0)
        entropy = -(logprobs.exp() * logprobs).sum()
        loss = loss - (sample.advantages[time] * logprobs[target] + algorithm.section.entropy_coef * entropy) / len(
            tokens
        )
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_a_step_on_constrained_replies_has_no_mismatch() -> None:
    pytest.importorskip("llguidance")
    engine = build_engine()
    samples = sample_two_turns(engine, CHOICES, with_masks=False)
    settings, algorithm = TrainerSection(), AlgorithmSection(algorithm_type="grpo")
    model = copy.deepcopy(MODEL)
    trainer = Trainer(model, settings, algorithm, max_model_len=400, num_total_steps=1, grammars=engine.grammars)
    metrics = trainer.step(samples)
    assert metrics["mismatch/kl"] < 1e-7
    assert metrics["mismatch/max_log_ratio"] < 1e-3
    blind = Trainer(model, settings, algorithm, max_model_len=400, num_total_steps=1)
    with pytest.raises(TrainingError, match="sampled under a grammar"):
        blind.step(samples)
    span = replace(samples[0].distribution_spans[0], distribution=Distribution(grammar='start: "x"'))
    other = replace(samples[0], distribution_spans=(span, *samples[0].distribution_spans[1:]))
    with pytest.raises(TrainingError, match="cannot be scored under the grammar"):
        trainer.step([other])
