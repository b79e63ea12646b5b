"""Tokens per second of forward and backward, of Tunesmith and plain transformers, on random weights of real shapes.

Workloads: rows of 512 tokens packed to 16k, one row of 16k, and a GRPO batch (16 prompts of about 100 tokens with 8
completions of 256). Every completion token is trained with GRPO's loss; a token shared by several samples counts once
per sample. The peers are the same architecture with transformers' SDPA attention on padded rows and its own loss, eager
and with compiled layers. The table ends with the speed that the device reaches in a large matrix product and a large
copy.

    python -m benchmarks.training.train --shape qwen3-0.6b --out results/training/train_cuda/qwen3-0.6b.json
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.shared.kernels import profile_kernels
from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES, build_random_model
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.experience.samples import Trie
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.forward.logprobs import choose_chunk_tokens
from tunesmith.trainer.layers.compiled_layers import compiled_layers
from tunesmith.trainer.layers.row_graphs import RowGraphs, is_launch_bound
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Distribution, DistributionSpan, Sample

WORKS = ("packed", "long", "grpo")
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense bfloat16, from the data sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians of one implementation on one workload."""

    seconds: float
    tokens_per_s: float
    flops_per_s: float
    peak_gb: float


def build_samples(work: str, vocab_size: int) -> list[Sample]:
    rng = random.Random(0)

    def draw(num_tokens: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(num_tokens)]

    if work == "packed":
        return [build_sample(draw(513), 1, i, i, vocab_size) for i in range(32)]
    if work == "long":
        return [build_sample(draw(16385), 1, 0, 0, vocab_size)]
    prompts = [draw(rng.randrange(60, 140)) for _ in range(16)]
    return [
        build_sample(prompt + draw(256), len(prompt), group, 8 * group + run, vocab_size)
        for group, prompt in enumerate(prompts)
        for run in range(8)
    ]


def build_sample(ids: list[int], num_prompt: int, group: int, trajectory: int, vocab_size: int) -> Sample:
    """A sample whose recorded logprobs are those of the uniform distribution."""
    mask, distribution = [time >= num_prompt for time in range(len(ids))], Distribution()
    advantage = 1.0 if trajectory % 2 else -0.7
    return Sample(
        token_ids=tuple(ids),
        is_sampled=tuple(mask),
        logprobs=tuple(-math.log(vocab_size) if m else 0.0 for m in mask),
        advantages=tuple(advantage if m else 0.0 for m in mask),
        policy_versions=tuple(0 if m else None for m in mask),
        distribution_spans=(DistributionSpan(start=mask.index(True), end=len(mask), distribution=distribution),),
        group_index=group,
        trajectory_index=trajectory,
    )


def count_flops(config: PretrainedConfig, rows: list[Trie]) -> float:
    """Necessary operations of forward and backward: matrix products, and attention over token pairs."""
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None) or 0
    size = size or config.hidden_size // heads
    attention = config.hidden_size * size * 2 * (heads + config.num_key_value_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    num_tokens = sum(row.num_tokens for row in rows)
    num_sites = sum(len({*zip(row.parent_E.tolist(), row.target_E.tolist(), strict=True)}) for row in rows)
    num_pairs = sum(float((row.depth_T + 1).sum()) for row in rows)
    per_layer = 6 * layer * num_tokens + 12 * heads * size * num_pairs
    return config.num_hidden_layers * per_layer + 6 * config.vocab_size * config.hidden_size * num_sites


def measure(run: Callable[[], object], *, num_repeats: int, num_warm_ups: int = 3) -> tuple[float, float]:
    """Median seconds after warm-up runs, and peak memory in GB."""
    for _ in range(num_warm_ups):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(num_repeats):
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 1e9


def pack(model: PreTrainedModel, samples: list[Sample], settings: TrainerSection) -> list[Trie]:
    return pack_samples(
        samples,
        max_tokens_per_row=settings.max_tokens_per_row,
        has_prefix_sharing=settings.has_prefix_sharing,
        hidden_size=model.config.hidden_size,
    )


def run_ours(
    model: PreTrainedModel, samples: list[Sample], *, num_repeats: int, has_graphs: bool, has_profile: bool
) -> tuple[Result, list[str]]:
    """Forward and backward as in the trainer, including the construction of rows, and the kernel profile."""
    settings, algorithm = TrainerSection(), resolve_algorithm(AlgorithmSection())
    rows = pack(model, samples, settings)
    chunk_tokens = choose_chunk_tokens(model)
    graphs = RowGraphs(model) if has_graphs else None
    setup = PassSetup(model=model, chunk_tokens=chunk_tokens, compiled=(model,), graphs=graphs)
    preparation = prepare_update(setup, algorithm, samples, rows)

    optimizer = MasterAdamW(model, settings)  # creates float32 gradients

    def run() -> None:
        optimizer.clear_gradients()
        run_loss_pass(setup, algorithm, samples, rows, preparation.inputs)

    with compiled_layers(model):
        seconds, peak_gb = measure(run, num_repeats=num_repeats)
        kernels = profile_kernels(run, num_rows=40) if has_profile else []
    return build_result(model, samples, rows, seconds, peak_gb), kernels


def build_result(
    model: PreTrainedModel, samples: list[Sample], rows: list[Trie], seconds: float, peak_gb: float
) -> Result:
    num_tokens = sum(len(sample.token_ids) - 1 for sample in samples)
    flops = count_flops(model.config, rows)
    return Result(seconds=seconds, tokens_per_s=num_tokens / seconds, flops_per_s=flops / seconds, peak_gb=peak_gb)


def run_peer(model: PreTrainedModel, samples: list[Sample], *, num_repeats: int) -> Result:
    """Forward and backward of transformers on padded rows, with its cross-entropy on all trained tokens."""
    length = max(len(sample.token_ids) for sample in samples)
    ids = torch.zeros((len(samples), length), dtype=torch.long, device="cuda")
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        num_tokens = len(sample.token_ids)
        ids[row, :num_tokens] = torch.tensor(sample.token_ids, device="cuda")
        mask[row, :num_tokens] = 1
        is_sampled = torch.tensor(sample.is_sampled, device="cuda")
        labels[row, :num_tokens] = ids[row, :num_tokens].masked_fill(~is_sampled, -100)
    attention_mask = None if bool(mask.all()) else mask

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, attention_mask=attention_mask, labels=labels, use_cache=False).loss.backward()

    seconds, peak_gb = measure(run, num_repeats=num_repeats)
    settings = TrainerSection(has_prefix_sharing=False, max_tokens_per_row=2**20)
    return build_result(model, samples, pack(model, samples, settings), seconds, peak_gb)


def measure_optimizer(model: PreTrainedModel, *, num_repeats: int) -> float:
    """Seconds of gradient norm, clipping, AdamW on float32 masters and the copy to the weights."""
    optimizer = MasterAdamW(model, TrainerSection())

    def update() -> float:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3, dtype=torch.float32)
        torch.cuda.synchronize()
        started = time.perf_counter()
        optimizer.update(learning_rate=1e-6, grad_norm=optimizer.compute_grad_norm(), max_grad_norm=1.0)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    return statistics.median([update() for _ in range(num_repeats + 2)][2:])


def measure_step(model: PreTrainedModel, samples: list[Sample], *, num_repeats: int, has_graphs: bool) -> float:
    """Seconds of a whole `Trainer.step`: packing, rows, forward, backward, update, metrics."""
    settings = TrainerSection(mismatch_warn=1e9, mismatch_stop=1e9, has_row_graphs=has_graphs)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=32768, num_total_steps=100)
    return measure(lambda: trainer.step(samples), num_repeats=num_repeats)[0]


def measure_ceilings() -> dict[str, float]:
    """FLOP/s of a large bfloat16 matrix product, and bytes/s (read plus written) of a large copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    product, _ = measure(lambda: [a @ b for _ in range(10)], num_repeats=3)
    copy, _ = measure(lambda: [target.copy_(source) for _ in range(10)], num_repeats=3)
    return {"product_flops_per_s": 20 * 8192**3 / product, "copy_bytes_per_s": 20 * 2**30 / copy}


def run_work(arguments: argparse.Namespace, model: PreTrainedModel, work: str) -> dict[str, Any]:
    samples = build_samples(work, model.config.vocab_size)
    has_graphs = is_launch_bound(model) if arguments.row_graphs is None else arguments.row_graphs
    ours, kernels = run_ours(
        model, samples, num_repeats=arguments.repeats, has_graphs=has_graphs, has_profile=arguments.profile
    )
    results = {"tunesmith": ours}
    if not arguments.without_peers:
        peer = build_random_model(arguments.shape, dtype=torch.bfloat16, device=torch.device("cuda"))
        results["transformers, eager"] = run_peer(peer, samples, num_repeats=arguments.repeats)
        for layer in peer.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile()
        results["transformers, compiled layers"] = run_peer(peer, samples, num_repeats=arguments.repeats)
        del peer
    step_s = measure_step(model, samples, num_repeats=arguments.repeats, has_graphs=has_graphs)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    for name, result in results.items():
        mfu = "" if peak is None else f"{100 * result.flops_per_s / peak:>8.1f} % MFU"
        print(
            f"{work:<8}{name:<32}{result.seconds * 1e3:>10.1f} ms{result.tokens_per_s:>12,.0f} tokens/s"
            f"{result.flops_per_s / 1e12:>8.0f} TFLOP/s{mfu}{result.peak_gb:>8.1f} GB",
            flush=True,
        )
    print(f"{work:<8}{'whole trainer step':<32}{step_s * 1e3:>10.1f} ms", flush=True)
    described = {
        name: {
            "seconds": result.seconds,
            "tokens_per_s": result.tokens_per_s,
            "flops_per_s": result.flops_per_s,
            "mfu": None if peak is None else result.flops_per_s / peak,
            "peak_gb": result.peak_gb,
        }
        for name, result in results.items()
    }
    return {"results": described, "trainer_step_s": step_s, "has_row_graphs": has_graphs, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="random weights of this shape")
    parser.add_argument("--work", action="append", choices=WORKS, help="workload; repeatable; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="measured repeats")
    parser.add_argument("--without-peers", action="store_true", help="do not run transformers")
    parser.add_argument(
        "--row-graphs",
        action=argparse.BooleanOptionalAction,
        help="as trainer.has_row_graphs; default: small models only",
    )
    parser.add_argument("--profile", action="store_true", help="also profile the GPU")
    parser.add_argument("--out", help="JSON file for the result, results/training/NAME.json")
    arguments = parser.parse_args()
    model = build_random_model(arguments.shape, dtype=torch.bfloat16, device=torch.device("cuda"))
    use_plan_attention(model)
    works = {work: run_work(arguments, model, work) for work in arguments.work or WORKS}
    optimizer_s = measure_optimizer(model, num_repeats=arguments.repeats)
    ceilings = measure_ceilings()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    chunk_gb = choose_chunk_tokens(model) * model.config.vocab_size * 4 / 1e9
    print(
        f"optimizer step of {num_parameters / 1e9:.2f}e9 parameters {optimizer_s * 1e3:.1f} ms (floor by bytes "
        f"{30 * num_parameters / ceilings['copy_bytes_per_s'] * 1e3:.1f} ms); logits alive {chunk_gb:.2f} GB; ceilings "
        f"{ceilings['product_flops_per_s'] / 1e12:.0f} TFLOP/s, {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    )
    first = next(iter(works.values()))["results"]
    publish(
        name=f"train_{arguments.shape}",
        unit="tokens a second",
        ours=first["tunesmith"]["tokens_per_s"],
        peers={name: result["tokens_per_s"] for name, result in first.items() if name != "tunesmith"},
        device="cuda",
        details={"works": works, "optimizer_step_s": optimizer_s, "ceilings": ceilings, "logits_gb": chunk_gb},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
