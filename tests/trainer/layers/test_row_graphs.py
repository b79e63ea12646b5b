"""Rows padded for CUDA graphs give the same update as unpadded ones."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from operator import itemgetter

import pytest
import torch

from sample_spans import build_spans
from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.errors import ConfigError
from tunesmith.trainer import loss_pass as step
from tunesmith.trainer.batch import build_row, copy_inputs_to_device, index_distributions
from tunesmith.trainer.layers.row_graphs import has_live_autograd_graph
from tunesmith.trainer.loss_pass import PassSetup
from tunesmith.trainer.metrics import add_parts
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.tree_attention.tile_schedule import TILINGS, build_table, compute_table_size, pad_trie
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Distribution, Sample

CHUNK_TOKENS = 16


def build_samples(num_groups: int, *, distributions: tuple[Distribution, ...] = (Distribution(),)) -> list[Sample]:
    """Groups of four answers to one prompt; answers often share their first two tokens."""
    rng, samples = random.Random(num_groups), []
    for group in range(num_groups):
        prompt = [rng.randrange(97) for _ in range(9)]
        for run in range(4):
            answer = [run % 2, *(rng.randrange(97) for _ in range(rng.randrange(3, 12)))]
            mask = [False] * len(prompt) + [True] * len(answer)
            samples.append(
                Sample(
                    token_ids=(*prompt, *answer), is_sampled=tuple(mask),
                    logprobs=tuple(-4.0 - rng.random() if m else 0.0 for m in mask),
                    advantages=tuple((1.0 if run % 2 else -0.7) if m else 0.0 for m in mask),
                    policy_versions=tuple(0 if m else None for m in mask),
                    distribution_spans=build_spans(
                        [distributions[run % len(distributions)] if m else None for m in mask]
                    ),
                    group_index=group, trajectory_index=4 * group + run,
                )
            )  # fmt: skip
    return samples


def run_rows(model, samples: list[Sample], section: AlgorithmSection, *, is_padded: bool):
    """The gradient, the totals of all chunks, and the sizes of the rows."""
    algorithm = resolve_algorithm(replace_needs(section))
    rows = pack_samples(samples, max_tokens_per_row=120, has_prefix_sharing=True, hidden_size=32)
    inputs = prepare_update(
        PassSetup(model=model, norm_length=64, chunk_tokens=CHUNK_TOKENS), algorithm, samples, rows
    ).inputs
    if section.kl_coef > 0:
        inputs = replace(inputs, reference_logprobs_E=inputs.sampler_logprobs_E - 0.1)
    start, parts, sizes = 0, [], []
    for trie in rows:
        part, distributions = slice(start, start := start + len(trie.parent_E)), index_distributions(samples, trie)
        row = build_row(trie, distributions, chunk_tokens=CHUNK_TOKENS, model=model, is_padded=is_padded)
        sent = copy_inputs_to_device(inputs.convert(itemgetter(part)), row, device=model.device, dtype=torch.float64)
        coef = torch.tensor(section.kl_coef, dtype=torch.float64)
        if section.kl_coef > 0:
            algorithm = resolve_algorithm(section)
        parts.append(step.run_row(model, row, sent, coef, algorithm=algorithm, is_compiled=False))
        sizes.append((row.input_ids_1T.shape[1], *(len(chunk.target_S) for chunk in row.chunks)))
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    totals = {name: value for name, (_, value) in add_parts(parts).items()}
    return gradient, totals, sizes


def replace_needs(section: AlgorithmSection) -> AlgorithmSection:
    """The section without its KL term, so that no reference is needed."""
    return section.model_copy(update={"kl_coef": 0.0})


@pytest.mark.parametrize(
    "section",
    [
        AlgorithmSection(),
        AlgorithmSection(entropy_coef=0.02, kl_coef=0.1),
        AlgorithmSection(algorithm_type="sft"),
    ],
    ids=["grpo", "entropy and kl", "sft"],
)
@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.7)])
def test_padding_changes_neither_gradient_nor_totals(section, temperatures):
    model = build_trainable("qwen3").double()
    samples = build_samples(7, distributions=tuple(Distribution(temperature=each) for each in temperatures))
    plain, filled = (run_rows(model, samples, section, is_padded=is_padded) for is_padded in (False, True))
    torch.testing.assert_close(filled[0], plain[0], rtol=1e-10, atol=1e-13)
    assert filled[1].keys() == plain[1].keys()
    for name, value in plain[1].items():
        torch.testing.assert_close(filled[1][name], value, rtol=1e-10, atol=1e-13)
    assert {size for sizes in filled[2] for size in sizes} == {128, CHUNK_TOKENS}
    assert len({size for sizes in plain[2] for size in sizes}) > 2


def test_tables_fit_the_reserved_memory():
    samples = [replace(sample, group_index=index) for index, sample in enumerate(build_samples(20))]
    (row,) = pack_samples(samples, max_tokens_per_row=9999, has_prefix_sharing=True, hidden_size=32)
    one_path = pack_samples(
        [replace(samples[0], distribution_spans=(), **{name: 60 * getattr(samples[0], name) for name in PER_TOKEN})],
        max_tokens_per_row=9999, has_prefix_sharing=True, hidden_size=32,
    )  # fmt: skip
    for trie in (row, *one_path):
        filled = pad_trie(trie)
        for tiling in TILINGS:
            assert len(build_table(filled, None, tiling)) <= compute_table_size(filled.num_tokens, tiling)


PER_TOKEN = ("token_ids", "is_sampled", "logprobs", "advantages", "policy_versions")


def test_live_autograd_graph_is_detected():
    model, samples = build_trainable(), build_samples(3)
    trainer = Trainer(model, TrainerSection(), AlgorithmSection(), max_model_len=64, num_total_steps=1)
    gc.disable()  # so that the garbage collector does not free it
    try:
        trainer.step(samples)
        assert not has_live_autograd_graph(model)
    finally:
        gc.enable()
    kept = model.get_output_embeddings().weight.sum()
    assert has_live_autograd_graph(model)
    kept.backward()
    del kept
    assert not has_live_autograd_graph(model)


def test_rows_cannot_be_captured_on_a_cpu():
    settings = TrainerSection(has_row_graphs=True)
    with pytest.raises(ConfigError, match="has_row_graphs"):
        Trainer(build_trainable(), settings, AlgorithmSection(), max_model_len=64, num_total_steps=1)
