"""Models whose rotary frequencies transformers would choose by the longest sequence of a forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Phi3Config, PreTrainedModel

from engines import GREEDY, build_engine, build_prompts, generate_all
from tiny_models import GEMMA_SIZES, SIZES, SLIDING
from trainable_models import build_answered
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.model.forward.attention import FIXED, fix_rotary_frequencies, use_plan_attention
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Sampling

ORIGINAL_LEN = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 3.0, 5.0, 9.0],
    "factor": 16.0,
    "original_max_position_embeddings": ORIGINAL_LEN,
}


def build_model(seed: int = 7) -> PreTrainedModel:
    config = Phi3Config(**SIZES, original_max_position_embeddings=ORIGINAL_LEN, rope_parameters=LONGROPE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    use_plan_attention(model)
    return model


def test_completions_do_not_depend_on_the_length_of_other_requests():
    """One of the short requests becomes longer than the original context while it decodes."""
    prompts, sampling = build_prompts(5, 12, 40), Sampling(max_tokens=10, distribution=GREEDY)
    together = generate_all(build_engine(build_model()), prompts, sampling)
    alone = [generate_all(build_engine(build_model()), [prompt], sampling)[0] for prompt in prompts]
    for one, other in zip(alone, together, strict=True):
        assert one.sampled_ids == other.sampled_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("max_tokens_per_row", [10, 10_000])
def test_the_trainer_scores_what_the_engine_sampled_in_every_packing(max_tokens_per_row):
    model = build_model()
    engine, prompts = build_engine(model), build_prompts(5, 12, 40)
    samples = build_answered(prompts, generate_all(engine, prompts, Sampling(max_tokens=10)))
    settings = TrainerSection(max_tokens_per_row=max_tokens_per_row, learning_rate=1e-9)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=128, num_total_steps=1)
    assert trainer.step(samples)["mismatch/max_log_ratio"] < 1e-4


@pytest.mark.parametrize(("max_model_len", "length"), [(ORIGINAL_LEN, 10), (ORIGINAL_LEN + 1, 40)])
def test_frequencies_are_those_of_the_longest_context(max_model_len, length):
    model, fixed, ids = build_model(), build_model(), torch.arange(length)[None]
    fix_rotary_frequencies(fixed, max_model_len=max_model_len)
    fix_rotary_frequencies(fixed, max_model_len=3)
    with torch.no_grad():
        torch.testing.assert_close(fixed(input_ids=ids).logits, model(input_ids=ids).logits)


def test_frequencies_of_single_layer_types_are_fixed():
    parameters = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": LONGROPE}
    sizes = GEMMA_SIZES | {"head_dim": 8}
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**sizes, **SLIDING, rope_parameters=copy.deepcopy(parameters), layer_types=layer_types)
    model = AutoModelForCausalLM.from_config(config).eval()
    use_plan_attention(model)
    fix_rotary_frequencies(model, max_model_len=64)
    rotary = model.get_decoder().rotary_emb
    assert rotary.rope_type == {"sliding_attention": "default", "full_attention": FIXED}
    short, long = torch.arange(4)[None], torch.arange(40)[None]
    for layer_type in parameters:
        before = rotary(torch.zeros(1), long, layer_type=layer_type)[0][:, :4]
        torch.testing.assert_close(rotary(torch.zeros(1), short, layer_type=layer_type)[0], before)
