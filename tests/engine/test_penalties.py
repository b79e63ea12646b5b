"""Penalties and bans: as transformers and the OpenAI API define them, and with the logprobs of the changed logits."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from engines import GREEDY, build_engine, build_prompts, compute_reference_logits, generate_all
from host_bursts import build_burst_engine
from tiny_models import build_tiny
from tunesmith.model.forward.distribution import truncate_logits
from tunesmith.types import (
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    Distribution,
    Sampling,
)

PROMPTS = build_prompts(3, 17, 30)
PENALTIES = [
    Distribution(repetition_penalty=1.7),
    Distribution(presence_penalty=0.8, temperature=0.7),
    Distribution(frequency_penalty=1.5, top_p=0.8),
    Distribution(repetition_penalty=0.5, presence_penalty=-2.0, frequency_penalty=0.3, logit_bias=((5, 3.0),)),
    Distribution(frequency_penalty=2.0, temperature=0),
]


def apply_by_hand(logits: torch.Tensor, prompt: list[int], output: list[int], distribution: Distribution) -> None:
    """Bias, then repetition, presence and frequency penalty, token by token."""
    for token_id, bias in distribution.logit_bias:
        logits[token_id] += bias
    for token_id in {*prompt, *output}:
        penalty = distribution.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id, count in Counter(output).items():
        logits[token_id] -= distribution.presence_penalty + count * distribution.frequency_penalty


@pytest.mark.parametrize("build", [build_engine, build_burst_engine])
@pytest.mark.parametrize("distribution", PENALTIES)
def test_logprobs_are_those_of_the_penalized_logits(build, distribution: Distribution) -> None:
    sampling = Sampling(max_tokens=25, distribution=distribution, return_entropy=True)
    for prompt, completion in zip(PROMPTS, generate_all(build(), PROMPTS, sampling), strict=True):
        output = list(completion.sampled_ids)
        logits = compute_reference_logits(build_tiny("llama"), prompt, output).double()
        rest = dataclasses.replace(
            distribution, logit_bias=(), repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
        )
        for step, token_id in enumerate(output):
            apply_by_hand(logits[step], prompt, output[:step], distribution)
            logprobs = truncate_logits(logits[step : step + 1], rest)[0].log_softmax(dim=0)
            assert completion.logprobs[step] == pytest.approx(logprobs[token_id].item(), abs=1e-3)
            entropy = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum().item()
            assert completion.entropies is not None
            assert completion.entropies[step] == pytest.approx(entropy, abs=1e-3)


def test_greedy_tokens_with_a_repetition_penalty_are_those_of_transformers() -> None:
    sampling = Sampling(max_tokens=15, distribution=dataclasses.replace(GREEDY, repetition_penalty=1.8))
    plain = generate_all(build_engine(), PROMPTS, Sampling(max_tokens=15, distribution=GREEDY))
    completions = generate_all(build_engine(), PROMPTS, sampling)
    assert [each.sampled_ids for each in completions] != [each.sampled_ids for each in plain]
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = build_tiny("llama").generate(
            torch.tensor([prompt]), max_new_tokens=15, do_sample=False, pad_token_id=0, repetition_penalty=1.8
        )
        assert list(completion.sampled_ids) == ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("build", [build_engine, build_burst_engine])
def test_no_end_id_is_sampled_before_min_tokens(build) -> None:
    bias = ((6, 50.0),)
    sampling = Sampling(max_tokens=20, stop_token_ids=(6,), distribution=Distribution(logit_bias=bias))
    assert {len(each.sampled_ids) for each in generate_all(build(), PROMPTS, sampling)} == {1}
    late = Distribution(logit_bias=bias, min_tokens=7, end_ids=(6,))
    for completion in generate_all(build(), PROMPTS, dataclasses.replace(sampling, distribution=late)):
        assert len(completion.sampled_ids) == 8
        assert completion.sampled_ids.index(6) == 7


def test_bad_words_are_never_sampled_and_the_rest_is_renormalized() -> None:
    free = generate_all(build_engine(), PROMPTS, Sampling(max_tokens=30, distribution=Distribution(temperature=0.3)))
    outputs = [completion.sampled_ids for completion in free]
    word, single = outputs[0][3:5], outputs[1][:1]
    banned = Distribution(temperature=0.3, bad_words=(word, single))
    completions = generate_all(build_engine(), PROMPTS, Sampling(max_tokens=30, distribution=banned))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = completion.sampled_ids
        assert single[0] not in ids
        assert word not in list(pairwise(ids))
        logits = compute_reference_logits(build_tiny("llama"), prompt, ids).double() / 0.3
        for step, token_id in enumerate(ids):
            logits[step, single[0]] = -math.inf
            if step and ids[step - 1] == word[0]:
                logits[step, word[1]] = -math.inf
            expected = logits[step].log_softmax(dim=0)[token_id].item()
            assert completion.logprobs[step] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("build", [build_engine, build_burst_engine])
@pytest.mark.parametrize("penalty", [MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY])
@pytest.mark.parametrize("temperature", [0.0, MIN_TEMPERATURE, 1.0])
def test_logprobs_are_finite_at_the_bounds(build, penalty: float, temperature: float) -> None:
    bias = ((5, MAX_LOGIT_BIAS), (6, MAX_LOGIT_BIAS), (7, -MAX_LOGIT_BIAS))
    distribution = Distribution(temperature=temperature, repetition_penalty=penalty, logit_bias=bias)
    completions = generate_all(build(), PROMPTS, Sampling(max_tokens=4, distribution=distribution))
    assert all(math.isfinite(each) for completion in completions for each in completion.logprobs)
    assert {token_id for completion in completions for token_id in completion.sampled_ids} <= {5, 6}


@pytest.mark.parametrize(
    ("distribution", "options", "message"),
    [
        (Distribution(repetition_penalty=0.0), {}, "repetition_penalty=0.0"),
        (Distribution(repetition_penalty=1e-308), {}, "repetition_penalty=1e-308"),
        (Distribution(presence_penalty=math.nan), {}, "presence_penalty"),
        (Distribution(min_tokens=9), {}, "min_tokens=9"),
        (Distribution(min_tokens=1), {"stop": ("a",)}, "stop strings"),
        (Distribution(bad_words=((),)), {}, "bad_words"),
        (Distribution(bad_words=((97,),)), {}, "bad_words"),
        (Distribution(grammar="start: 'a'", bad_words=((1,),)), {}, "cannot be combined with a grammar"),
        (Distribution(logit_bias=((5, 1e39),)), {}, r"logit_bias of token 5 is 1e\+39"),
    ],
)
def test_invalid_penalties_are_refused(distribution: Distribution, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_all(build_engine(), PROMPTS[:1], Sampling(max_tokens=4, distribution=distribution, **options))
