"""A mixture of experts of the shape of Qwen3-30B-A3B with LoRA on one GPU: sampling, a GRPO step, memory, mismatch.

Weights are random and are created on the device. `--rows` are the concurrent requests: groups of eight share a prompt.
The first round compiles and captures; the others are reported. Mismatch is the mean k3 of sampler and trainer. With
`--replay` the engine records the experts of each token, and every second round of the trainer replays them.

    python -m benchmarks.training.experts --rows 256 --out results/training/experts/sampling_256.json
    python -m benchmarks.training.experts --rows 64 --trains attention --out results/training/experts/attention.json
    python -m benchmarks.training.experts --rows 64 --trains experts --out results/training/experts/experts.json
    python -m benchmarks.training.experts --layers 12 --trains attention --replay --rounds 4 --out OUT.json

`--layers 2 --device cpu --narrow --rows 8 --num-new 8` runs in seconds without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.engine.peer_vllm import run_vllm
from benchmarks.shared.report import describe_environment, describe_settings, save_record
from benchmarks.shared.shapes import SHAPES
from tunesmith.config import AlgorithmSection, EngineSection, LoraSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.experts import UNKNOWN
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Completion, Distribution, DistributionSpan, Sample, Sampling

GROUP = 8
LEARNING_RATE = 1e-5
SHAPE = "qwen3-30b-a3b"
NARROW = {
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_experts": 16,
}
TARGETS: dict[str, Any] = {
    "attention": "attention",
    "experts": ("q_proj", "k_proj", "v_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"),
}


def build_model(arguments: argparse.Namespace) -> PreTrainedModel:
    config = copy.deepcopy(SHAPES[SHAPE])
    config.update((NARROW if arguments.narrow else {}) | {"bos_token_id": None, "eos_token_id": None})
    config.num_hidden_layers = arguments.layers
    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    if arguments.trains is not None:
        add_adapter(model, LoraSection(r=16, target_modules=TARGETS[arguments.trains]), base="", dtype=dtype)
    use_plan_attention(model)
    return model


def list_prompts(arguments: argparse.Namespace, *, seed: int) -> list[list[int]]:
    """Random prompts, each for a group of requests."""
    generator = torch.Generator().manual_seed(seed)
    shape = (arguments.rows // GROUP, arguments.prompt)
    size = NARROW["vocab_size"] if arguments.narrow else SHAPES[SHAPE].vocab_size
    return [row for row in torch.randint(0, size, shape, generator=generator).tolist() for _ in range(GROUP)]


def sample(engine: LocalEngine, prompts: list[list[int]], num_new: int) -> list[Completion]:
    async def run() -> list[Completion]:
        sampling = Sampling(max_tokens=num_new, ignore_eos=True)
        numbered = [dataclasses.replace(sampling, seed=index) for index in range(len(prompts))]
        return await asyncio.gather(*map(engine.generate, prompts, numbered))

    return run_lockstep(run())


def build_samples(prompts: list[list[int]], completions: list[Completion], *, version: int) -> list[Sample]:
    samples = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        num_prompt, num_new, routes = len(prompt), len(completion.sampled_ids), completion.routes
        span = DistributionSpan(start=num_prompt, end=num_prompt + num_new, distribution=Distribution())
        samples.append(
            Sample(
                token_ids=(*prompt, *completion.sampled_ids),
                is_sampled=(False,) * num_prompt + (True,) * num_new,
                logprobs=(0.0,) * num_prompt + tuple(completion.logprobs),
                advantages=(0.0,) * num_prompt + ((1.0 if index % 2 else -1.0),) * num_new,
                policy_versions=(None,) * num_prompt + (version,) * num_new,
                distribution_spans=(span,),
                group_index=index // GROUP,
                trajectory_index=index,
                routes=None if routes is None else np.pad(routes, ((0, 1), (0, 0), (0, 0)), constant_values=UNKNOWN),
            )
        )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="concurrent requests, a multiple of eight")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--num-new", type=int, default=128, help="sampled tokens of a request")
    parser.add_argument("--layers", type=int, default=SHAPES[SHAPE].num_hidden_layers)
    parser.add_argument("--trains", choices=sorted(TARGETS), help="also make GRPO steps, with an adapter of these")
    parser.add_argument("--replay", action="store_true", help="record routes; steps with and without take turns")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=8192, help="as trainer.max_tokens_per_row")
    parser.add_argument("--kv-cache-gib", type=float, default=16.0)
    parser.add_argument("--decode", default="compiled", choices=["compiled", "graphs", "eager"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--narrow", action="store_true", help="a small model, to try the script")
    parser.add_argument("--vllm", action="store_true", help="first measure vLLM's sampling of the same prompts")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    peer = None
    if arguments.vllm:
        sizes = ["--sequences", arguments.rows, "--prompt-tokens", arguments.prompt, "--new-tokens", arguments.num_new]
        peer = run_vllm(SHAPE, *map(str, [*sizes, "--group", GROUP, "--repeats", 2, "--gpu-memory", 0.8]))
    is_cuda = arguments.device == "cuda"
    started = time.perf_counter()
    model = build_model(arguments)
    cache_gib = arguments.kv_cache_gib if is_cuda else 0.1
    settings = EngineSection(max_num_seqs=arguments.rows, kv_cache_gib=cache_gib, cuda_decode=arguments.decode)
    max_model_len = arguments.prompt + arguments.num_new + 16
    engine = LocalEngine(model, None, settings, max_model_len=max_model_len)
    trainer = None
    if arguments.replay:
        engine.record_routes()
    if arguments.trains is not None:
        section = TrainerSection(
            learning_rate=LEARNING_RATE, max_tokens_per_row=arguments.row_tokens, mismatch_stop=1e9, mismatch_warn=1e9,
            has_gradient_checkpointing=True, routing_replay=arguments.replay,
        )  # fmt: skip
        trainer = Trainer(model, section, AlgorithmSection(), max_model_len=max_model_len, num_total_steps=8)
    record = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "vllm": peer,
        "setup_s": time.perf_counter() - started,
        "rounds": [],
    }
    for version in range(arguments.rounds):
        prompts = list_prompts(arguments, seed=version)
        started = time.perf_counter()
        completions = sample(engine, prompts, arguments.num_new)
        seconds = time.perf_counter() - started
        figures = {"rollout_s": seconds, "sampled_tokens_per_s": arguments.rows * arguments.num_new / seconds}
        if trainer is not None:
            samples = build_samples(prompts, completions, version=version)
            if version % 2 == 0:  # without routes the trainer's routers choose
                samples = [dataclasses.replace(each, routes=None) for each in samples]
            engine.pause()
            started = time.perf_counter()
            metrics = trainer.step(samples)
            if is_cuda:
                torch.cuda.synchronize()
            figures["train_s"] = time.perf_counter() - started
            figures["step_s"] = figures["rollout_s"] + figures["train_s"]
            figures |= {name: metrics[name] for name in sorted(metrics) if name.startswith(("mismatch/", "routing/"))}
            figures["train/num_tokens"] = metrics["train/num_tokens"]
            engine.resume(version + 1)
        record["rounds"].append(figures)
        print(json.dumps(figures), flush=True)
    if is_cuda:
        record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        record["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    print(json.dumps(record))
    if arguments.out is not None:
        record |= {"settings": describe_settings(arguments), "environment": describe_environment(arguments.device)}
        save_record(arguments.out, record)


if __name__ == "__main__":
    main()
