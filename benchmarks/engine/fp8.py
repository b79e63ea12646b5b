"""Rollouts with the model's own weights and with their FP8 copy: tokens a second, mismatch, the cost of the copy.

Random weights of a real shape, with logits as spread as a trained model's. `decode` and `engine` are as in rollout.py.
The mismatch is that of a run: logprobs of the sampled tokens by the engine and by the trainer's scoring pass (k3).

    python -m benchmarks.engine.fp8 --shape qwen2.5-7b --sequences 256 \\
        --out results/engine/rollout_cuda/fp8_qwen2.5-7b.json
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Literal, get_args

import torch
from transformers import PreTrainedModel

from benchmarks.engine.decoding import Decoding
from benchmarks.shared.kernels import profile_kernels
from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES, build_random_model
from benchmarks.training.own_mismatch import build_prompts, build_rollout, build_samples, measure, spread_logits
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.forward.logprobs import choose_chunk_tokens
from tunesmith.trainer.batch import index_events
from tunesmith.trainer.layers.compiled_layers import compiled_layers
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import score_tokens

DECODE_STEPS = 64
CUDA = torch.device("cuda")
WeightFormat = Literal["model", "fp8"]


def measure_decoding(
    model: PreTrainedModel, arguments: argparse.Namespace, weight_format: WeightFormat
) -> tuple[list[float], list[str]]:
    """Seconds of `DECODE_STEPS` steps, and the kernel profile."""
    decoding = Decoding(
        model,
        num_sequences=arguments.sequences,
        context=arguments.prompt_tokens,
        num_steps=DECODE_STEPS,
        mode="compiled",
        weight_format=weight_format,
    )
    seconds = [decoding.run(DECODE_STEPS, 16) for _ in range(arguments.repeats + 1)][1:]
    return seconds, profile_kernels(lambda: decoding.run(DECODE_STEPS, 16)) if arguments.profile else []


def measure_format(
    model: PreTrainedModel, arguments: argparse.Namespace, weight_format: WeightFormat
) -> dict[str, Any]:
    """Rates and mismatch of sampling from one format of the weights."""
    num_sequences, first = arguments.sequences, arguments.prompt_tokens
    decode_s, kernels = measure_decoding(model, arguments, weight_format)
    torch.cuda.empty_cache()
    max_model_len = first + arguments.new_tokens
    section = EngineSection(
        max_num_seqs=num_sequences, kv_cache_tokens=num_sequences * (max_model_len + 64), weight_format=weight_format
    )
    engine = LocalEngine(model, None, section, max_model_len=max_model_len)
    prompts = build_prompts(model.config.vocab_size, num_sequences, first)
    answer = build_rollout(engine, prompts, arguments.new_tokens)
    completions = answer()
    engine_s = measure(answer, arguments.repeats, CUDA)
    refresh_s = measure(lambda: refresh(engine), arguments.repeats, CUDA)
    samples = build_samples(prompts, completions)[: arguments.scored]
    num_tokens = num_sequences * arguments.new_tokens
    return {
        "decode_tokens_per_s": num_sequences * DECODE_STEPS / statistics.median(decode_s),
        "decode_step_ms": statistics.median(decode_s) / DECODE_STEPS * 1e3,
        "engine_tokens_per_s": num_tokens / engine_s,
        "refresh_s": refresh_s,
        "kernels": kernels,
    } | compute_mismatch(model, samples)


def refresh(engine: LocalEngine) -> None:
    """What the engine does after an update of the weights."""
    engine.pause()
    engine.resume(engine.policy_version + 1)


def compute_mismatch(model: PreTrainedModel, samples: list[Any]) -> dict[str, float]:
    """k3, largest log-ratio, and what truncated importance weights would be, over the sampled tokens."""
    rows = pack_samples(
        samples, max_tokens_per_row=16384, has_prefix_sharing=True, hidden_size=model.config.hidden_size
    )
    with compiled_layers(model):
        trainer_R = score_tokens(model, samples, rows, chunk_tokens=choose_chunk_tokens(model))[0]
    events = index_events(samples, rows)
    sampler_E = events.gather([sample.logprobs for sample in samples])
    log_ratio = torch.from_numpy(trainer_R[events.event_E] - sampler_E)
    ratio = log_ratio.exp()
    return {
        "k3": (ratio - 1 - log_ratio).mean().item(),
        "max_log_ratio": log_ratio.abs().max().item(),
        "mean_weight": ratio.clamp(max=2.0).mean().item(),
        "truncated_share": (ratio > 2.0).double().mean().item(),
        "outside_clip_0.2": ((ratio - 1).abs() > 0.2).double().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-7b", help="random weights of this shape")
    parser.add_argument("--sequences", type=int, default=256, help="concurrent requests")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens sampled per request")
    parser.add_argument("--scored", type=int, default=64, help="sequences whose mismatch is measured")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats")
    parser.add_argument("--profile", action="store_true", help="also profile the kernels of decoding")
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    model = build_random_model(arguments.shape, dtype=torch.bfloat16, device=CUDA)
    use_plan_attention(model)
    spread_logits(model, build_prompts(model.config.vocab_size, 1, arguments.prompt_tokens)[0])
    found = {}
    for weight_format in get_args(WeightFormat):
        found[weight_format] = ours = measure_format(model, arguments, weight_format)
        torch.cuda.empty_cache()
        print(
            weight_format, {key: float(f"{value:.4g}") for key, value in ours.items() if key != "kernels"}, flush=True
        )
        for row in ours["kernels"][:16]:
            print("   ", row[:120])
    publish(
        name=f"fp8_{arguments.shape}",
        unit="sampled tokens a second with FP8 weights",
        ours=found["fp8"]["engine_tokens_per_s"],
        peers={"the model's own weights": found["model"]["engine_tokens_per_s"]},
        device="cuda",
        details={"arguments": {k: v for k, v in vars(arguments).items() if k != "out"}, "formats": found},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
