"""The trainer on a CUDA device: kernels against float64, and the same gradient in every mode."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from sample_spans import build_spans
from tiny_models import CONFIGS
from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.experience.samples import Trie, build_trie, concatenate_tries
from tunesmith.model.forward.attention import AttentionOptions, attend_masked
from tunesmith.model.forward.logprobs import compute_logprobs
from tunesmith.trainer.layers.compiled_layers import compiled_layers
from tunesmith.trainer.layers.gradient_checkpointing import checkpointed_layers, enable_checkpointing
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import score_tokens
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.tree_attention import plan as attention
from tunesmith.trainer.tree_attention.plan import TreePlan, build_mask
from tunesmith.trainer.tree_attention.tile_schedule import choose_tiling
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Distribution, Sample

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def build_samples(num_groups: int, *, prompt: int = 60, answer: int = 50, seed: int = 0) -> list[Sample]:
    rng, samples = random.Random(seed), []
    for group in range(num_groups):
        shared = [rng.randrange(97) for _ in range(prompt)]
        for run in range(4):
            ids = shared + [rng.randrange(97) for _ in range(rng.randrange(answer // 2, answer))]
            mask = [False] * prompt + [True] * (len(ids) - prompt)
            samples.append(
                Sample(
                    token_ids=tuple(ids), is_sampled=tuple(mask),
                    logprobs=tuple(-4.5 if m else 0.0 for m in mask),
                    advantages=tuple((1.0 if run % 2 else -0.7) if m else 0.0 for m in mask),
                    policy_versions=tuple(0 if m else None for m in mask),
                    distribution_spans=build_spans([Distribution() if m else None for m in mask]),
                    group_index=group, trajectory_index=4 * group + run,
                )
            )  # fmt: skip
    return samples


def build_row(samples: list[Sample]) -> Trie:
    groups = sorted({sample.group_index for sample in samples})
    return concatenate_tries(
        [build_trie(samples, [i for i, s in enumerate(samples) if s.group_index == group]) for group in groups]
    )


def compare_attention(
    trie: Trie, dtype: torch.dtype, head_size: int, heads: tuple[int, int], options: AttentionOptions,
    *, has_order_of_sampler: bool = False,
) -> list[float]:  # fmt: skip
    """Relative errors of output and gradients against float64 under a dense mask."""
    window = options.sliding_window
    exact_heads = (heads[0] // heads[1], head_size) if has_order_of_sampler else None
    plan = TreePlan(trie, CUDA, heads=exact_heads)
    torch.manual_seed(0)
    shapes = [(1, number, trie.num_tokens, head_size) for number in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device=CUDA, dtype=dtype, requires_grad=True) for shape in shapes]
    if options.sinks is not None:
        inputs.append(options.sinks.detach().requires_grad_())
    wide = [x.detach().double().requires_grad_() for x in inputs]
    sinks = [None] if options.sinks is None else [inputs[3], wide[3]]
    ours = plan.attend(None, *inputs[:3], replace(options, sinks=sinks[0]))
    mask = build_mask(trie, window).to(CUDA)
    theirs = attend_masked(*wide[:3], mask, replace(options, sinks=sinks[-1])).transpose(1, 2)
    weights = torch.randn_like(ours)
    ours_all = [ours, *torch.autograd.grad((ours * weights).sum(), inputs)]
    theirs_all = [theirs, *torch.autograd.grad((theirs * weights.double()).sum(), wide)]
    return [((a - b).norm() / b.norm()).item() for a, b in zip(ours_all, theirs_all, strict=True)]


@pytest.mark.parametrize(
    ("head_size", "heads", "window", "softcap"),
    [(64, (9, 3), None, None), (128, (4, 2), None, None), (80, (2, 2), 70, None), (256, (2, 1), 70, 30.0)],
)
def test_tree_attention_in_bfloat16_equals_a_dense_mask(head_size, heads, window, softcap):
    heavy = build_samples(1, prompt=150, answer=600)  # the prompt's keys are split across programs
    for samples in (build_samples(3), build_samples(8), heavy):
        errors = compare_attention(
            build_row(samples), torch.bfloat16, head_size, heads,
            AttentionOptions(sliding_window=window, softcap=softcap),
        )  # fmt: skip
        assert max(errors) < 1e-2, errors


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("head_size", "window"), [(64, None), (64, 70), (512, None)])
def test_tree_attention_with_sinks_and_wide_heads_equals_a_dense_mask(dtype, limit, head_size, window):
    options = AttentionOptions(sliding_window=window, sinks=torch.randn(4, device=CUDA) * 2)
    errors = compare_attention(build_row(build_samples(3)), dtype, head_size, (4, 2), options)
    assert max(errors) < limit, errors


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, 5.0)])
def test_tree_attention_in_float32_equals_a_dense_mask(window, softcap):
    errors = compare_attention(
        build_row(build_samples(5)),
        torch.float32,
        32,
        (6, 2),
        AttentionOptions(scaling=0.2, sliding_window=window, softcap=softcap),
    )
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_tree_attention_equals_a_dense_mask_with_the_tiles_of_other_gpus(monkeypatch, head_size):
    choose = partial(choose_tiling, is_wide=False, is_hopper=False)
    monkeypatch.setattr(attention, "choose_tiling", lambda size, **_ignored: choose(size))
    for samples in (build_samples(3), build_samples(1, prompt=150, answer=600)):
        errors = compare_attention(build_row(samples), torch.bfloat16, head_size, (4, 2), AttentionOptions())
        assert max(errors) < 1e-2, errors


@pytest.mark.parametrize(
    ("head_size", "heads", "window", "softcap"),
    [(64, (9, 3), None, None), (128, (4, 2), None, None), (80, (2, 2), 70, None), (128, (7, 1), 70, 30.0)],
)
def test_attention_in_the_order_of_the_sampler_equals_a_dense_mask(head_size, heads, window, softcap):
    options = AttentionOptions(sliding_window=window, softcap=softcap)
    for samples in (build_samples(3), build_samples(8), build_samples(1, prompt=150, answer=600)):
        row = build_row(samples)
        errors = compare_attention(row, torch.bfloat16, head_size, heads, options, has_order_of_sampler=True)
        assert max(errors) < 1e-2, errors


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_logprobs_equal_float64(name, temperature):
    """Logprobs, entropies and both gradients; the weight's gradient is accumulated in float32."""
    torch.manual_seed(0)
    hidden = torch.randn(50, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    head = torch.nn.Linear(64, 5001, bias=False, device=CUDA, dtype=torch.bfloat16)
    config = CONFIGS[name]
    targets, weights = torch.randint(5001, (50,), device=CUDA), torch.randn(50, device=CUDA, dtype=torch.float64)
    model = SimpleNamespace(get_output_embeddings=lambda: head, config=config)
    head.weight.grad_dtype = torch.float32
    for _ in range(2):
        scores = compute_logprobs(
            model, hidden, targets, Distribution(temperature=temperature), chunk_tokens=50, with_entropy=True
        )
        (weights * (scores[0] + 0.3 * scores[1])).sum().backward()
    wide, matrix = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    logits = wide @ matrix.T
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    logp = (logits / temperature).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    (2 * weights * (expected[0] + 0.3 * expected[1])).sum().backward()
    for ours, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert head.weight.grad.dtype == torch.float32
    for ours, theirs in ((hidden.grad, wide.grad), (head.weight.grad, matrix.grad)):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


def compute_gradient(
    model: PreTrainedModel,
    samples: list[Sample],
    *,
    has_sharing: bool = True,
    max_tokens: int = 4096,
    chunk_tokens: int = 256,
    is_compiled: bool = False,
    has_checkpointing: bool = False,
) -> torch.Tensor:
    rows = pack_samples(samples, max_tokens_per_row=max_tokens, has_prefix_sharing=has_sharing, hidden_size=32)
    algorithm = resolve_algorithm(AlgorithmSection())
    optimizer = MasterAdamW(model, TrainerSection())
    setup = PassSetup(model=model, chunk_tokens=chunk_tokens, compiled=(model,) if is_compiled else ())
    preparation = prepare_update(setup, algorithm, samples, rows)
    if has_checkpointing:
        enable_checkpointing(model)
    checkpoint = checkpointed_layers if has_checkpointing else nullcontext
    with compiled_layers(*setup.compiled), checkpoint(model):
        run_loss_pass(setup, algorithm, samples, rows, preparation.inputs)
    gradient = torch.cat([parameter.grad.flatten().double().cpu() for parameter in model.parameters()])
    optimizer.clear_gradients()
    return gradient


def compute_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


def test_float32_gradients_of_all_modes_agree_with_float64_on_the_cpu():
    samples = build_samples(8)
    exact = compute_gradient(build_trainable("qwen3").double(), samples)
    model = build_trainable("qwen3", dtype=torch.float32).cuda()
    modes = (
        {"is_compiled": True},
        {"is_compiled": True, "max_tokens": 700, "chunk_tokens": 100},
        {"is_compiled": True, "has_sharing": False},
        {"is_compiled": False, "max_tokens": 300, "chunk_tokens": 1000},
    )
    errors = [compute_error(compute_gradient(model, samples, **mode), exact) for mode in modes]
    assert max(errors) < 1e-4, errors


@pytest.mark.parametrize("is_compiled", [True, False])
def test_checkpointing_keeps_the_output_of_attention_and_the_gradient(is_compiled, monkeypatch):
    """Attention runs as often as without checkpointing, though its inputs are computed again."""
    from tunesmith.trainer.tree_attention.kernels import tree_attention  # needs Triton

    samples, grids = build_samples(8), []
    model, kernel = build_trainable("qwen3", dtype=torch.bfloat16).cuda(), tree_attention.attention_forward

    class CountedKernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(tree_attention, "attention_forward", CountedKernel())
    exact = compute_gradient(build_trainable("qwen3", dtype=torch.bfloat16).double(), samples)
    plain = compute_gradient(model, samples, is_compiled=is_compiled)
    num_runs = len(grids)
    checkpointed = compute_gradient(model, samples, is_compiled=is_compiled, has_checkpointing=True)
    assert len(grids) == 2 * num_runs > 0
    assert compute_error(checkpointed, exact) < 1.05 * compute_error(plain, exact)


def test_neither_sharing_nor_compiling_adds_an_error_in_bfloat16():
    samples, errors = build_samples(8), np.zeros(3)
    for seed in range(4):
        exact = compute_gradient(build_trainable("qwen3", dtype=torch.bfloat16, seed=seed).double(), samples)
        model = build_trainable("qwen3", dtype=torch.bfloat16, seed=seed).cuda()
        modes = ({"has_sharing": False}, {}, {"is_compiled": True})
        errors += [compute_error(compute_gradient(model, samples, **mode), exact) for mode in modes]
    plain, shared, compiled = errors
    assert shared < 1.5 * plain, errors
    assert compiled < 1.2 * shared, errors


@pytest.mark.parametrize("has_checkpointing", [True, False])
def test_steps_on_the_gpu_move_bfloat16_weights_in_place(has_checkpointing):
    model = build_trainable("qwen3", dtype=torch.bfloat16).cuda()
    settings = TrainerSection(learning_rate=1e-2, mismatch_stop=1e9, has_gradient_checkpointing=has_checkpointing)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=256, num_total_steps=4)
    pointers, before = [p.data_ptr() for p in model.parameters()], [p.detach().clone() for p in model.parameters()]
    losses = [trainer.step(build_samples(8))["train/loss"] for _ in range(3)]
    assert losses[-1] < losses[0]
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_scored_entropies_on_the_gpu_equal_float64_on_the_cpu(dtype, tolerance):
    samples = build_samples(4)
    rows = pack_samples(samples, max_tokens_per_row=1000, has_prefix_sharing=True, hidden_size=32)
    exact = score_tokens(build_trainable("qwen3", dtype=dtype).double(), samples, rows, chunk_tokens=100)
    found = score_tokens(build_trainable("qwen3", dtype=dtype).cuda(), samples, rows, chunk_tokens=100)
    assert (exact[1] > 0).all() and exact[1].std() > 0
    for ours, theirs in zip(found, exact, strict=True):
        assert abs(ours - theirs).max() < tolerance


@pytest.mark.parametrize(
    "section",
    [
        {"algorithm_type": "dapo", "top_entropy_fraction": 0.2},
        {"algorithm_type": "dppo_tv"},
        {"algorithm_type": "dppo_kl"},
        {"algorithm_type": "gmpo"},
        {"algorithm_type": "vespo"},
        {"algorithm_type": "clip_cov", "terms_args": {"fraction": 0.1, "covariance_low": 0.0}},
        {"algorithm_type": "kl_cov", "terms_args": {"fraction": 0.1}},
    ],
)
def test_selected_tokens_are_trained_alike_with_and_without_row_graphs(section):
    found = []
    for has_row_graphs in (False, True):
        model = build_trainable("qwen3", dtype=torch.bfloat16).cuda()
        settings = TrainerSection(learning_rate=1e-3, mismatch_stop=1e9, has_row_graphs=has_row_graphs)
        trainer = Trainer(model, settings, AlgorithmSection(**section), max_model_len=256, num_total_steps=4)
        found.append([trainer.step(build_samples(8)) for _ in range(3)])
    for plain, graph in zip(*found, strict=True):
        assert plain.keys() == graph.keys() and plain["train/grad_norm"] > 0
        # In bfloat16 entropies near the threshold round to either side of it: other tokens are selected.
        tolerance = 0.2 if "top_entropy_fraction" in section else 0.05
        for name in ("train/loss", "train/grad_norm"):
            assert graph[name] == pytest.approx(plain[name], rel=tolerance, abs=1e-3), name
    if "top_entropy_fraction" in section:
        assert 0.7 < plain["train/entropy_masked_frac"] <= 0.8


def test_a_batch_and_its_update_never_synchronize_with_the_device():
    model, samples = build_trainable("qwen3", dtype=torch.bfloat16).cuda(), build_samples(8)
    algorithm, optimizer = resolve_algorithm(AlgorithmSection()), MasterAdamW(model, TrainerSection())
    rows = pack_samples(samples, max_tokens_per_row=1000, has_prefix_sharing=True, hidden_size=32)
    setup = PassSetup(model=model, chunk_tokens=100, compiled=(model,))
    inputs = prepare_update(setup, algorithm, samples, rows).inputs

    def run() -> None:
        run_loss_pass(setup, algorithm, samples, rows, inputs)
        optimizer.update(learning_rate=1e-6, grad_norm=optimizer.compute_grad_norm(), max_grad_norm=1.0)

    with compiled_layers(model):
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_at_most_one_copy_of_one_chunk_of_logits_is_in_memory():
    head = torch.nn.Linear(32, 65536, bias=False, device=CUDA, dtype=torch.bfloat16)
    model = SimpleNamespace(get_output_embeddings=lambda: head, config=CONFIGS["qwen3"])
    hidden = torch.randn(8192, 32, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(65536, (8192,), device=CUDA)
    compute_logprobs(model, hidden, targets, Distribution(), chunk_tokens=512)[0].sum().backward()  # cuBLAS' workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    compute_logprobs(model, hidden, targets, Distribution(), chunk_tokens=512)[0].sum().backward()
    float32_chunk = 512 * 65536 * 4
    assert torch.cuda.max_memory_allocated() - start < 1.2 * float32_chunk
