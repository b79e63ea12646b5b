"""Memory and seconds of training on long rows, and attention alone beside torch's on the same rows.

Works: `row`, one sample of 32k tokens; `tries`, eight samples of 16k with a common prompt of 8k, as one trie of 72k
tokens or split at `--max-tokens-per-row`. A step is a whole `Trainer.step` with gradient checkpointing on random
weights, all of them trained or a LoRA adapter of rank 16. Operations are those that cannot be avoided, attention
included and the second forward of checkpointing not (`count_flops`). FlashAttention and cuDNN have no tries, so they
attend to each sample whole. cuDNN builds a plan for each new length, so its first call at a length is timed too.

    python -m benchmarks.training.long_rows --shape qwen3-0.6b --work row
    python -m benchmarks.training.long_rows --shape qwen2.5-7b --lora --work row
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shared.report import TimeLimit, add_time_limit, describe_settings, publish
from benchmarks.shared.shapes import SHAPES, build_random_model
from benchmarks.training.train import PEAK_FLOPS, build_sample, count_flops, measure, pack
from tunesmith.config import AlgorithmSection, LoraSection, TrainerSection
from tunesmith.experience.samples import Trie
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.forward.attention import AttentionOptions, use_plan_attention
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.tree_attention.plan import TreePlan, describe_attention
from tunesmith.types import Sample

WORKS = ("row", "tries")
NUM_WARM_UPS = 2
"""The first step compiles, the second reserves memory as all later ones."""


def build_samples(work: str, vocab_size: int, *, scale: float) -> list[Sample]:
    rng = random.Random(0)

    def draw(num_tokens: float) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(int(num_tokens))]

    if work == "row":
        return [build_sample(draw(32768 * scale + 1), 1, 0, 0, vocab_size)]
    prompt = draw(8192 * scale)
    return [build_sample(prompt + draw(8192 * scale), len(prompt), 0, run, vocab_size) for run in range(8)]


def measure_attention(model: Any, rows: list[Trie], samples: list[Sample], *, num_repeats: int) -> dict[str, float]:
    """Milliseconds of one layer, forward and both passes together: ours over the rows, torch's over samples."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    device, options = torch.device("cuda"), AttentionOptions(scaling=size**-0.5)

    def draw(num_tokens: int) -> list[torch.Tensor]:
        return [
            torch.randn((1, count, num_tokens, size), device=device, dtype=torch.bfloat16, requires_grad=True)
            for count in heads
        ]

    plans = [(TreePlan(row, device, **describe_attention(model)), draw(row.num_tokens)) for row in rows]
    paths = [draw(len(sample.token_ids) - 1) for sample in samples]
    module = nn.Module()

    def attend(*, has_backward: bool) -> None:
        for plan, (query, key, value) in plans:
            output = plan.attend(module, query, key, value, options)
            if has_backward:
                torch.autograd.grad(output, (query, key, value), torch.ones_like(output))

    def attend_paths(backend: SDPBackend, *, has_backward: bool) -> None:
        with sdpa_kernel(backend):
            for query, key, value in paths:
                output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                if has_backward:
                    torch.autograd.grad(output, (query, key, value), torch.ones_like(output))

    figures: dict[str, float] = {}
    peers = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    works: dict[str, Callable[..., None]] = {"ours": attend}
    works |= {name: partial(attend_paths, backend) for name, backend in peers.items()}
    for name, work in works.items():
        for has_backward in (False, True):
            run = partial(work, has_backward=has_backward)
            kind = "both" if has_backward else "forward"
            figures[f"{name}_{kind}_first_ms"] = measure(run, num_repeats=1, num_warm_ups=0)[0] * 1e3
            figures[f"{name}_{kind}_ms"] = measure(run, num_repeats=num_repeats, num_warm_ups=NUM_WARM_UPS)[0] * 1e3
    pairs = sum(float((row.depth_T + 1).sum()) for row in rows)
    path_pairs = sum((len(sample.token_ids) - 1) * len(sample.token_ids) / 2 for sample in samples)
    for name in ("ours", *peers):
        flops = 12 * heads[0] * size * (pairs if name == "ours" else path_pairs)
        figures[f"{name}_flops_per_s"] = flops / figures[f"{name}_both_ms"] * 1e3
    return figures


def run_work(arguments: argparse.Namespace, model: Any, work: str, settings: TrainerSection) -> dict[str, Any]:
    samples = build_samples(work, model.config.vocab_size, scale=arguments.scale)
    rows = pack(model, samples, settings)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=2**16, num_total_steps=100)
    run = partial(trainer.step, samples)
    seconds, peak_gb = measure(run, num_repeats=arguments.repeats, num_warm_ups=NUM_WARM_UPS)
    del trainer, run
    gc.collect()  # its masters and moments
    torch.cuda.empty_cache()
    flops = count_flops(model.config, rows)
    if arguments.lora:
        # frozen weights have no gradients: their products are two of three; attention's stay
        config, size = model.config, getattr(model.config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        pairs = sum(float((row.depth_T + 1).sum()) for row in rows)
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * size * pairs
        flops = attention + (flops - attention) * 2 / 3
    peak = next((each for name, each in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    figures = {
        "row_tokens": [row.num_tokens for row in rows], "seconds": seconds, "peak_gb": peak_gb,
        "flops_per_s": flops / seconds, "mfu": None if peak is None else flops / seconds / peak,
    }  # fmt: skip
    share = "" if peak is None else f" ({100 * flops / seconds / peak:.1f} % of peak)"
    print(
        f"{work:<6} rows {figures['row_tokens']}: {seconds:.2f} s, {peak_gb:.1f} GB, "
        f"{flops / seconds / 1e12:.0f} TFLOP/s{share}",
        flush=True,
    )
    attention_figures = measure_attention(model, rows, samples, num_repeats=arguments.repeats)
    print("  attention of a layer:", "; ".join(f"{name} {value:.4g}" for name, value in attention_figures.items()))
    return figures | {"attention": attention_figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="random weights of this shape")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--lora", action="store_true", help="train an adapter of rank 16 on attention")
    parser.add_argument("--max-tokens-per-row", type=int, default=81920)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths")
    parser.add_argument("--repeats", type=int, default=1, help="measured repeats, after two warm-ups")
    add_time_limit(parser)
    parser.add_argument("--out", help="JSON file for the result, results/training/NAME.json")
    arguments = parser.parse_args()
    limit = TimeLimit(arguments.limit_s)
    model = build_random_model(arguments.shape, dtype=torch.bfloat16, device=torch.device("cuda"))
    use_plan_attention(model)
    if arguments.lora:
        add_adapter(model, LoraSection(), base=arguments.shape, dtype=torch.bfloat16)
    settings = TrainerSection(
        has_gradient_checkpointing=True, max_tokens_per_row=arguments.max_tokens_per_row, mismatch_warn=1e9,
        mismatch_stop=1e9,
    )  # fmt: skip
    figures: dict[str, dict[str, Any]] = {}
    for work in arguments.work:
        if limit.has_room(work):
            figures[work] = run_work(arguments, model, work, settings)
            publish(
                name=f"long_rows_{arguments.shape}", unit="floating-point operations a second",
                ours=next(iter(figures.values()))["flops_per_s"], peers={}, device="cuda",
                details={"settings": describe_settings(arguments), "figures": figures}, out=arguments.out,
            )  # fmt: skip


if __name__ == "__main__":
    main()
