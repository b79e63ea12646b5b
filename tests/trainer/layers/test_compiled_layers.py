"""Compiled layers and losses: traced as on a GPU, executed eagerly."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch._dynamo.utils import counters

from recurrent_paths import PATHS, build_row
from trainable_models import build_deep, build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.scores import TokenLosses
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.model.forward.attention import CausalPlan, run_body
from tunesmith.model.forward.recurrence import SegmentTable
from tunesmith.trainer import loss_pass as step
from tunesmith.trainer.batch import DeviceInputs
from tunesmith.trainer.layers import compiled_layers as compiling
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.tree_attention.cpu import split_segments


@pytest.fixture
def compile_function(monkeypatch):
    """`compiled_layers.compile_function` without code generation, which takes minutes on a CPU."""
    torch._dynamo.reset()
    counters.clear()
    function = lru_cache(lambda function: torch.compile(function, dynamic=True, backend="aot_eager"))
    monkeypatch.setattr(compiling, "compile_function", function)
    return function


def add_gradients(model, num_tokens: int) -> torch.Tensor:
    ids = torch.arange(num_tokens)[None] * 7 % 97
    hidden = run_body(model, ids, torch.arange(num_tokens)[None], CausalPlan([num_tokens], torch.device("cpu")))
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach()


def run_layers(model, num_tokens: int) -> list[torch.Tensor]:
    hidden = add_gradients(model, num_tokens)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [hidden, *gradients]


@pytest.mark.parametrize(
    ("name", "num_graphs"),
    [
        ("qwen3_5", 3),  # recurrent layers, layers with attention, the last norm
        ("lfm2", 2),  # one for the layers, one for the last norm
    ],
)
def test_one_graph_serves_all_layers_of_a_kind_and_all_lengths(compile_function, monkeypatch, name, num_graphs):
    monkeypatch.setattr("tunesmith.model.forward.recurrence.get_least_size", lambda device: 2)  # as on a GPU
    model, lengths = build_trainable(name), (12, 30, 130)
    expected = [run_layers(model, num_tokens) for num_tokens in lengths]
    with compiling.compiled_layers(model):
        ours = [run_layers(model, num_tokens) for num_tokens in lengths]
    for all_ours, all_expected in zip(ours, expected, strict=True):
        for a, b in zip(all_ours, all_expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if name == "qwen3_5":
        assert_padded_trie_has_the_gradients_of_eager_layers(model)  # by the same graph
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]


def assert_padded_trie_has_the_gradients_of_eager_layers(model) -> None:
    """Branches, chunks of several turns, and padding after them, which has no gradient."""
    trie = build_row(PATHS["over a chunk"])
    layer = next(each for each in model.get_decoder().layers if each.block_type == "linear_attention")
    plan, num_tokens = CausalPlan([trie.num_tokens], torch.device("cpu")), trie.num_tokens
    results = []
    for num_added in (0, 10):
        plan.segments = SegmentTable(split_segments(trie), torch.device("cpu"), num_tokens=num_tokens + num_added)
        source = torch.linspace(-1, 1, (num_tokens + 10) * 32, dtype=torch.float64).view(1, -1, 32).sin()
        source = source[:, : num_tokens + num_added].requires_grad_()
        places = torch.arange(source.shape[1])[None].expand(4, 1, -1)
        options = {"position_embeddings": model.get_decoder().rotary_emb(source, places[1:]), "position_ids": places[0]}
        with compiling.compiled_layers(model) if num_added else nullcontext():
            output = layer(source, attention_mask=None, cache=None, use_cache=False, attention_plan=plan, **options)
        assert output.isfinite().all()
        output = output[:, :num_tokens]
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        gradients = [each.grad for each in layer.parameters() if each.grad is not None]
        results.append([output.detach(), source.grad[:, :num_tokens], *gradients])
        layer.zero_grad()
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_models_with_and_without_float32_residuals_are_compiled_separately(compile_function):
    for has_fp32_residual, num_graphs in ((True, 2), (False, 4), (True, 4)):
        model = build_deep("qwen3", has_fp32_residual=has_fp32_residual, num_layers=3)
        expected = run_layers(model, 12)
        with compiling.compiled_layers(model):
            ours = run_layers(model, 12)
        for a, b in zip(ours, expected, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm()
        assert counters["stats"]["unique_graphs"] == num_graphs
    for expected, ours in zip(*add_gradients_of_an_update(), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - expected).norm() <= 0.02 * expected.norm()
    assert counters["stats"]["unique_graphs"] == 4, "an update runs the graphs that there are"
    assert not counters["graph_break"]


def add_gradients_of_an_update() -> list[list[torch.Tensor]]:
    """The float32 gradients of two rows in 16 bits, of eager layers and of compiled ones."""
    model = build_deep("qwen3", has_fp32_residual=False, num_layers=3)
    optimizer = MasterAdamW(model, TrainerSection())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    gradients = []
    for is_compiled in (False, True):
        add_gradients(model, 12)
        with compiling.compiled_layers(model) if is_compiled else nullcontext():
            add_gradients(model, 30)
        gradients.append([parameter.grad for parameter in model.get_decoder().parameters()])
        optimizer.clear_gradients()
    return gradients


def test_exact_layers_run_the_fused_layer_alone(monkeypatch):
    """What the fused layers compute is tested in `test_exact_layers.py`; here they double what the modeling code
    computes."""
    model = build_trainable("qwen3")

    def double(function):
        return lambda *arguments, **options: 2 * function(*arguments, **options)

    layer = model.get_decoder().layers[0]
    source = torch.randn(1, 12, 32, dtype=torch.float64)
    plan = CausalPlan([12], torch.device("cpu"))
    angles = model.get_decoder().rotary_emb(source, torch.arange(12)[None])
    options = {"attention_mask": None, "position_embeddings": angles, "attention_plan": plan}
    inputs = [source.clone().requires_grad_() for _ in range(2)]
    expected = layer(inputs[0], **options)
    monkeypatch.setattr(compiling, "is_exact", lambda: True)
    monkeypatch.setattr(compiling, "fuse_function", double)
    monkeypatch.delattr(compiling, "compile_function")
    with compiling.compiled_layers(model):
        ours = layer(inputs[1], **options)
    assert torch.equal(ours, 2 * expected)
    weights = torch.randn_like(ours)
    gradients = [
        torch.autograd.grad((output * weights).sum(), [x, *layer.parameters()])
        for output, x in zip((2 * expected, ours), inputs, strict=True)
    ]
    for one, same in zip(*gradients, strict=True):
        torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)


def test_layers_are_restored_after_an_error():
    model = build_trainable("llama")
    with pytest.raises(KeyError), compiling.compiled_layers(model):
        assert all("forward" in vars(layer) for layer in model.get_decoder().layers)
        raise KeyError
    assert not any("forward" in vars(module) for module in model.modules())


def test_models_on_a_cpu_are_not_compiled():
    assert not compiling.can_compile(build_trainable())


def compute_own_losses(scores, *, clip=0.2):
    ratio_N = (scores.logprobs_N - scores.old_logprobs_N).exp()
    is_outside_N = (ratio_N - 1).abs() > clip
    losses_N = -scores.advantages_N * torch.where(is_outside_N, ratio_N.detach() * scores.logprobs_N, ratio_N)
    return TokenLosses(losses_N=losses_N, metrics={"outside_frac": is_outside_N.to(losses_N.dtype)})


SECTIONS = {
    "grpo": AlgorithmSection(entropy_coef=0.01, kl_coef=0.1, kl_estimator="k3"),
    "sft": AlgorithmSection(algorithm_type="sft"),
    "own": AlgorithmSection(loss="own:loss"),
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_one_graph_computes_the_eager_loss_for_all_chunk_sizes_and_kl_coefs(compile_function, kind):
    """`kl_adaptive` replaces the algorithm after every update."""
    section = SECTIONS[kind]
    algorithm = resolve_algorithm(section, functions={"algorithm.loss": compute_own_losses})
    names = (
        "weights_N", "correction_N", "advantages_N", "old_logprobs_N", "sampler_logprobs_N", "is_newest_N",
        "reference_logprobs_N",
    )  # fmt: skip
    with compiling.compiled_layers(build_trainable("llama")):
        compiled = compile_function(step.compute_chunk_loss)
        for num_sites, num_events, kl_coef in ((8, 8, 0.1), (7, 9, 0.2), (12, 30, 0.3), (30, 31, 0.1), (31, 31, 0.0)):
            torch.manual_seed(num_events)
            is_whole = num_sites in (12, 31)  # one chunk is the whole row
            row, first = (
                torch.rand(len(names), num_events if is_whole else 3 * num_events),
                0 if is_whole else num_events,
            )
            sent = DeviceInputs(names=names, values_FE=row).select(slice(first, first + num_events))
            if kind == "grpo":
                algorithm = replace(algorithm, kl_coef=kl_coef)
            sites = torch.arange(num_events) % num_sites
            logprobs, entropies = (-torch.rand(num_sites) - 1).requires_grad_(), torch.rand(num_sites)
            scores = logprobs, entropies.requires_grad_(section.entropy_coef > 0)
            found = []
            for measure in (compiled, step.compute_chunk_loss):
                logprobs.grad = entropies.grad = None
                loss, found_names, totals = measure(*scores, sites, sent, algorithm, torch.tensor(kl_coef))
                loss.backward()
                found.append((found_names, loss.detach(), totals.detach(), logprobs.grad, entropies.grad))
            (our_names, *ours), (expected_names, *expected) = found
            assert our_names == expected_names
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
