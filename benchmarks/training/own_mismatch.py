"""Mismatch of Tunesmith's engine and trainer on random weights, with residuals in both dtypes or with exact numerics,
and the cost of each.

The engine samples completions of random prompts; the first step of the trainer compares its logprobs with the engine's,
as in every run (`mismatch/kl` is k3). Because the weights are random, the last norm is scaled until the logits have the
standard deviation of a trained model's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.shared.kernels import profile_kernels
from benchmarks.shared.shapes import build_random_model
from tunesmith.config import AlgorithmSection, EngineSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.forward.exact import use_exact_numerics
from tunesmith.model.forward.fp32_residual import use_fp32_residual
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Completion, Distribution, DistributionSpan, Sample, Sampling

RESIDUALS, EXACT, BOTH = ("bfloat16 residuals", "float32 residuals"), "exact", "both"
LOGIT_STD = 4.2
"""Measured with SmolLM2-135M on chat prompts."""
WARMUP_STEPS = 3
"""Trainer steps before the measurement: the first compiles layers, the next ones capture CUDA graphs of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Results for one residual dtype or exact numerics: the mismatch of a step, and median speeds."""

    k3: float
    max_log_ratio: float
    engine_tokens_per_s: float
    step_s: float
    step_peak_gb: float | None
    """Peak GPU memory of a step, engine included."""


def measure_shape(arguments: argparse.Namespace) -> dict[str, Figures]:
    """Measure and print a line for each residual dtype, or on a GPU for exact numerics; for both, their prices too."""
    found = {}
    if arguments.numerics == BOTH:
        found[EXACT] = run_exact(arguments)
    print(f"{'':<20}{'k3':>10}{'largest log-ratio':>19}{'engine tokens/s':>17}{'step s':>10}{'peak GB':>9}")
    for name in {EXACT: (EXACT,), BOTH: (EXACT, RESIDUALS[0])}.get(arguments.numerics, RESIDUALS):
        if name == EXACT and not found:
            use_exact_numerics()  # in this process, for good
        if name not in found:
            found[name] = measure_residuals(arguments, is_wide=name == "float32 residuals")
        ours = found[name]
        peak = "-" if ours.step_peak_gb is None else f"{ours.step_peak_gb:.2f}"
        print(
            f"{name:<20}{ours.k3:>10.2e}{ours.max_log_ratio:>19.3f}{ours.engine_tokens_per_s:>17,.0f}"
            f"{ours.step_s:>10.3f}{peak:>9}",
            flush=True,
        )
    if arguments.numerics == BOTH:
        num_tokens = arguments.sequences * arguments.new_tokens
        sampling, training = (
            [num_tokens / found[name].engine_tokens_per_s for name in (EXACT, RESIDUALS[0])],
            [found[name].step_s for name in (EXACT, RESIDUALS[0])],
        )
        whole = [sum(pair) for pair in zip(sampling, training, strict=True)]
        for what, (exact, fast) in (("sampling", sampling), ("trainer step", training), ("both", whole)):
            print(f"exact / fast, {what}: {exact:.3f} s / {fast:.3f} s = {exact / fast:.2f}", flush=True)
    return found


def run_exact(arguments: argparse.Namespace) -> Figures:
    """Measure exact numerics in a process of their own."""
    sizes = [f"--{key.replace('_', '-')}={value}" for key, value in describe(arguments).items()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "exact.json"
        command = [sys.executable, "-m", "benchmarks.training.mismatch", f"--device={arguments.device}", f"--out={out}"]
        options = [f"--numerics={EXACT}", f"--kernels={arguments.kernels}"]
        subprocess.run([*command, *sizes, *options], check=True)
        return Figures(**json.loads(out.read_text())["details"][EXACT])


def measure_residuals(arguments: argparse.Namespace, *, is_wide: bool) -> Figures:
    device = torch.device(arguments.device)
    model = build_random_model(arguments.shape, dtype=torch.bfloat16, device=device)
    use_plan_attention(model)
    prompts = build_prompts(model.config.vocab_size, arguments.sequences, arguments.prompt_tokens)
    spread_logits(model, prompts[0])
    if is_wide:
        use_fp32_residual(model)
    max_model_len = arguments.prompt_tokens + arguments.new_tokens
    section = EngineSection(
        max_num_seqs=arguments.sequences, kv_cache_tokens=arguments.sequences * (max_model_len + 64)
    )
    engine = LocalEngine(model, None, section, max_model_len=max_model_len)
    answer = build_rollout(engine, prompts, arguments.new_tokens)
    samples = build_samples(prompts, answer())
    engine_s = measure(answer, arguments.repeats, device)
    # With a learning rate this small 16-bit weights do not change, so all steps do the same work.
    settings = TrainerSection(learning_rate=1e-12, mismatch_warn=1e9, mismatch_stop=1e9)
    num_steps = arguments.repeats + WARMUP_STEPS + 2  # a profile takes two
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=max_model_len, num_total_steps=num_steps)
    metrics, *_ = [trainer.step(samples) for _ in range(WARMUP_STEPS)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_s = measure(lambda: trainer.step(samples), arguments.repeats, device)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    for what, work in (("sampling", answer), ("step", lambda: trainer.step(samples))) if arguments.kernels else ():
        print("\n".join([f"kernels, {what}:", *profile_kernels(work, num_rows=arguments.kernels)]), flush=True)
    return Figures(
        k3=metrics["mismatch/kl"],
        max_log_ratio=metrics["mismatch/max_log_ratio"],
        engine_tokens_per_s=arguments.sequences * arguments.new_tokens / engine_s,
        step_s=step_s,
        step_peak_gb=peak,
    )


def measure(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median seconds; the caller has warmed `work` up."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


@torch.no_grad()
def spread_logits(model: PreTrainedModel, prompt: Sequence[int]) -> None:
    """Scale the last norm so that logits have the standard deviation of a trained model's."""
    logits = model(input_ids=torch.tensor([prompt], device=model.device)).logits.float()
    model.get_decoder().norm.weight.mul_(LOGIT_STD / logits.std())


def build_prompts(vocab_size: int, num_sequences: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_sequences)]


def build_rollout(engine: LocalEngine, prompts: Sequence[list[int]], num_tokens: int) -> Callable[[], list[Completion]]:
    """A function that samples `num_tokens` tokens for every prompt, starting with an empty KV cache."""

    async def generate() -> list[Completion]:
        samplings = [Sampling(max_tokens=num_tokens, seed=index, ignore_eos=True) for index in range(len(prompts))]
        calls = [
            engine.generate(prompt, sampling, order=(index,))
            for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        return await asyncio.gather(*calls)

    def run() -> list[Completion]:
        engine.pause()
        engine.resume(engine.policy_version + 1)
        return run_lockstep(generate())

    return run


def build_samples(prompts: Sequence[list[int]], completions: Sequence[Completion]) -> list[Sample]:
    """Samples in groups of two, one with a positive and one with a negative advantage."""
    samples, distribution = [], Distribution()
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        answer = completion.sampled_ids
        mask = [False] * len(prompt) + [True] * len(answer)
        samples.append(
            Sample(
                token_ids=(*prompt, *answer),
                is_sampled=tuple(mask),
                logprobs=(*[0.0] * len(prompt), *completion.logprobs),
                advantages=tuple((1.0 if index % 2 else -1.0) if m else 0.0 for m in mask),
                policy_versions=tuple(0 if m else None for m in mask),
                distribution_spans=(
                    DistributionSpan(start=mask.index(True), end=len(mask), distribution=distribution),
                ),
                group_index=index // 2,
                trajectory_index=index,
            )
        )
    return samples


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(arguments, key) for key in ("shape", "sequences", "prompt_tokens", "new_tokens", "repeats")}
