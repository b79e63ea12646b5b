"""Tokens per second of rollouts: decoding alone, through the engine, and through agents that call the endpoint.

`decode` samples 64 tokens for every request from contexts of 128 tokens on, on a GPU, with no admission and no stop
conditions. `engine` samples 256 tokens with logprobs for each prompt of 128 tokens, prefill included. `agents` runs the
engine under agents that ask GSM8K questions through the endpoint, with answers of the model's own length; it also
reports the CPU time of a call. Each figure has a floor (the necessary bytes and operations at the speed that this
device reaches in a large copy and a large matrix product) and the share of it. Peers run on the same prompts and
lengths.

    python -m benchmarks.engine.rollout --shape qwen3-0.6b --sequences 256 512 \\
        --out results/engine/rollout_cuda/qwen3-0.6b.json
    python -m benchmarks.engine.rollout --model models/smollm2-135m-instruct --questions gsm8k/train.jsonl --agents 512
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import pstats
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.engine.agent_load import measure_agents
from benchmarks.engine.decoding import Decoding
from benchmarks.engine.peer_generate import run_continuous_batching, run_generate
from benchmarks.engine.peer_vllm import run_vllm
from benchmarks.shared.kernels import profile_kernels
from benchmarks.shared.report import publish
from benchmarks.shared.shapes import SHAPES, build_random_model
from tunesmith.config import EngineSection, LoraSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.forward.recurrence import count_state_bytes, list_recurrent
from tunesmith.model.load import load_model
from tunesmith.types import Completion, Sampling

DECODE_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured peak speeds of the device."""

    flops_per_s: float
    """Of a large matrix product in the dtype of the model."""
    bytes_per_s: float
    """Of a large copy, bytes read plus written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Measurements of one workload."""

    tokens_per_s: float
    seconds: list[float]
    floor_s: float
    details: dict[str, Any]

    @property
    def share(self) -> float:
        return self.floor_s / statistics.median(self.seconds)


def build_model(arguments: argparse.Namespace) -> PreTrainedModel:
    device = torch.device(arguments.device)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    if arguments.model is not None:
        return load_model(arguments.model, dtype=dtype, device=device)
    model = build_random_model(arguments.shape, dtype=dtype, device=device).requires_grad_(False)
    use_plan_attention(model)
    return model


def measure(work: Callable[[], object], repeats: int, device: str, *, has_warm_up: bool = True) -> list[float]:
    """Seconds of each repeat, after one warm-up."""
    seconds = []
    for _ in range(repeats + has_warm_up):
        started = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[has_warm_up:]


def measure_ceilings(device: str) -> Ceilings:
    size, num_bytes = (8192, 2**30) if device != "cpu" else (1024, 2**26)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(num_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = statistics.median(measure(lambda: [a @ b for _ in range(5)], 3, device)) / 5
    copy = statistics.median(measure(lambda: [target.copy_(source) for _ in range(5)], 3, device)) / 5
    return Ceilings(flops_per_s=2 * size**3 / product, bytes_per_s=2 * num_bytes / copy)


def compute_floor(
    model: PreTrainedModel,
    ceilings: Ceilings,
    *,
    num_sequences: int,
    first: int,
    num_steps: int,
    num_prompt_tokens: int,
) -> float:
    """Lower bound in seconds for any sampler: prefill, and steps whose contexts grow from `first`.

    A step reads each multiplied weight and each cached key and value once, reads and writes each recurrent state once,
    and multiplies each row by each weight; the larger of the two times counts.
    """
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    body -= 0 if config.tie_word_embeddings else head
    num_layers = config.num_hidden_layers - len(list_recurrent(model))  # those that attend
    cached = 2 * num_layers * config.num_key_value_heads * size * model.dtype.itemsize
    scored = 4 * num_layers * config.num_attention_heads * size
    states = 2 * count_state_bytes(model)  # read and written
    seconds = 2 * body * num_prompt_tokens / ceilings.flops_per_s
    for context in range(first, first + num_steps):
        num_bytes = (body + head) * model.dtype.itemsize + num_sequences * (context * cached + states)
        flops = num_sequences * (2 * (body + head) + scored * context)
        seconds += max(num_bytes / ceilings.bytes_per_s, flops / ceilings.flops_per_s)
    return seconds


def build_prompts(vocab_size: int, num_sequences: int, num_tokens: int, group: int) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(-(-num_sequences // group))]
    return [prompts[index // group] for index in range(num_sequences)]


def build_engine(model: PreTrainedModel, arguments: argparse.Namespace, num_sequences: int) -> LocalEngine:
    longest = arguments.prompt_tokens + arguments.new_tokens
    settings = EngineSection(
        max_num_seqs=num_sequences,
        kv_cache_tokens=num_sequences * (longest + 64),
        cuda_decode=arguments.cuda_decode,
        decode_block=arguments.decode_block,
    )
    return LocalEngine(model, None, settings, max_model_len=longest)


def build_work(
    engine: LocalEngine, prompts: Sequence[list[int]], num_tokens: int, *, device: str
) -> Callable[[], None]:
    """A function that samples `num_tokens` tokens for every prompt, starting with an empty KV cache."""

    async def generate() -> list[Completion]:
        sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
        calls = [
            engine.generate(prompt, dataclasses.replace(sampling, seed=index), order=(index,))
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    def run() -> None:
        engine.pause()
        engine.resume(engine.policy_version + 1)
        completions = run_lockstep(generate())
        assert all(len(completion.logprobs) == num_tokens for completion in completions)

    return run


def run_engine(model: PreTrainedModel, arguments: argparse.Namespace, ceilings: Ceilings, num_sequences: int) -> Figure:
    """Measure whole rollouts through the engine, prefill included."""
    engine = build_engine(model, arguments, num_sequences)
    prompts = build_prompts(model.config.vocab_size, num_sequences, arguments.prompt_tokens, arguments.group)
    num_prompt_tokens = arguments.prompt_tokens * len({id(prompt) for prompt in prompts})
    started = time.perf_counter()
    build_work(engine, prompts, 2, device=arguments.device)()
    ready_s = time.perf_counter() - started
    times = {}
    for num_tokens in (1, arguments.new_tokens):
        work = build_work(engine, prompts, num_tokens, device=arguments.device)
        times[num_tokens] = measure(work, arguments.repeats, arguments.device)
    engine.compute_stats()
    build_work(engine, prompts, arguments.new_tokens, device=arguments.device)()
    stats = engine.compute_stats()
    prefill_s = statistics.median(times[1])
    floor = compute_floor(
        model, ceilings, num_sequences=num_sequences, first=arguments.prompt_tokens, num_steps=arguments.new_tokens,
        num_prompt_tokens=num_prompt_tokens,
    )  # fmt: skip
    details = {"first_step_s": ready_s, "prefill_s": prefill_s, "stats": stats}
    if arguments.profile:
        work = build_work(engine, prompts, arguments.new_tokens, device=arguments.device)
        details["profile"] = profile(work)
        details["kernels"] = profile_kernels(work) if arguments.device != "cpu" else []
    return build_figure(times[arguments.new_tokens], num_sequences * arguments.new_tokens, floor, details)


def run_decoding(
    model: PreTrainedModel, arguments: argparse.Namespace, ceilings: Ceilings, num_sequences: int
) -> Figure:
    first, mode = arguments.prompt_tokens, arguments.cuda_decode
    decoding = Decoding(model, num_sequences=num_sequences, context=first, num_steps=DECODE_STEPS, mode=mode)
    seconds = [decoding.run(DECODE_STEPS, arguments.decode_block) for _ in range(arguments.repeats + 1)][1:]
    floor = compute_floor(
        model, ceilings, num_sequences=num_sequences, first=first, num_steps=DECODE_STEPS, num_prompt_tokens=0
    )
    details = {}
    if arguments.profile:
        details["kernels"] = profile_kernels(lambda: decoding.run(DECODE_STEPS, arguments.decode_block))
    return build_figure(seconds, num_sequences * DECODE_STEPS, floor, details)


def build_figure(seconds: list[float], num_tokens: int, floor_s: float, details: dict[str, Any]) -> Figure:
    rate = num_tokens / statistics.median(seconds)
    return Figure(tokens_per_s=rate, seconds=seconds, floor_s=floor_s, details=details)


def profile(work: Callable[[], object]) -> list[str]:
    """Profile of the interpreter: own seconds, calls, function."""
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(work)
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda row: -row[1][2])[:20]  # type: ignore[attr-defined]
    return [f"{own:.4f} {calls} {Path(file).name}:{line} {name}" for (file, line, name), (_, calls, own, *_) in rows]


def run_peers(model: PreTrainedModel, arguments: argparse.Namespace, num_sequences: int) -> dict[str, float]:
    """Tokens per second of transformers on the same weights, prompts and lengths."""
    prompts = build_prompts(model.config.vocab_size, num_sequences, arguments.prompt_tokens, arguments.group)
    num_tokens = num_sequences * arguments.new_tokens
    generate_s = measure(lambda: run_generate(model, prompts, arguments.new_tokens), 1, arguments.device)
    rates = {"transformers generate": num_tokens / min(generate_s)}
    if arguments.continuous_batching:
        batched_s = measure(lambda: run_continuous_batching(model, prompts, arguments.new_tokens), 1, arguments.device)
        rates["transformers continuous batching"] = num_tokens / min(batched_s)
    return rates


def run_vllm_peer(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens per second of vLLM by number of sequences and form of the logprobs."""
    options = ["--prompt-tokens", arguments.prompt_tokens, "--new-tokens", arguments.new_tokens]
    options += ["--group", arguments.group, "--repeats", arguments.repeats]
    result = run_vllm(arguments.shape, "--sequences", *map(str, [*arguments.sequences, *options]))
    rates: dict[str, dict[str, float]] = {}
    for cell in result["cells"]:
        name = f"vLLM {result['version']}, logprobs {cell['logprobs']}"
        rates.setdefault(str(cell["sequences"]), {})[name] = cell["tokens_per_s"]
    return rates


def print_figure(name: str, figure: Figure) -> None:
    median = statistics.median(figure.seconds)
    print(
        f"{name:<44}{figure.tokens_per_s:>12,.0f}{median:>10.3f}{figure.floor_s:>10.3f}{100 * figure.share:>8.0f} %",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="device of the model")
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m", help="random weights of this shape")
    parser.add_argument("--model", help="folder of a model, instead of --shape")
    parser.add_argument("--sequences", type=int, nargs="*", default=[256, 512, 1024], help="concurrent requests")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens sampled per request")
    parser.add_argument("--group", type=int, default=1, help="number of requests that share a prompt")
    parser.add_argument("--lora-rank", type=int, help="sample with an adapter of this rank")
    parser.add_argument("--lora-targets", default="attention", choices=("attention", "all-linear"))
    parser.add_argument(
        "--agents", type=int, nargs="*", default=[], help="concurrent agents; needs --model and --questions"
    )
    parser.add_argument("--questions", help="JSON lines file with a field question")
    parser.add_argument(
        "--cuda-decode", choices=["compiled", "graphs", "eager"], default="compiled", help="as engine.cuda_decode"
    )
    parser.add_argument("--decode-block", type=int, default=16, help="as engine.decode_block")
    parser.add_argument("--repeats", type=int, default=3, help="measured repeats")
    parser.add_argument("--profile", action="store_true", help="also profile the interpreter and the GPU")
    parser.add_argument("--without-peers", action="store_true", help="do not run transformers")
    parser.add_argument(
        "--peer-sequences", type=int, nargs="*", help="values of --sequences at which peers run; default: all"
    )
    parser.add_argument("--vllm", action="store_true", help="first run vLLM on --shape, in its own process")
    parser.add_argument("--continuous-batching", action="store_true", help="also run transformers' generate_batch")
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args()
    if arguments.agents and (arguments.model is None or arguments.questions is None):
        parser.error("--agents needs --model and --questions, because agents exchange text")
    if arguments.vllm and arguments.model is not None:
        parser.error("--vllm runs random weights of --shape: leave --model out")
    peers = run_vllm_peer(arguments) if arguments.vllm else {}
    model, ceilings = build_model(arguments), measure_ceilings(arguments.device)
    if arguments.lora_rank is not None:
        add_adapter(
            model, LoraSection(r=arguments.lora_rank, target_modules=arguments.lora_targets), base="", dtype=model.dtype
        )
    figures: dict[str, Figure] = {}
    print(f"{'':<44}{'tokens/s':>12}{'seconds':>10}{'floor':>10}{'share':>10}")
    for num_sequences in arguments.sequences:
        works = {"decode": run_decoding} if arguments.device != "cpu" and arguments.cuda_decode != "eager" else {}
        for name, work in (works | {"engine": run_engine}).items():
            figure = work(model, arguments, ceilings, num_sequences)
            figures[f"{name} {num_sequences}"] = figure
            print_figure(f"{name}, {num_sequences} sequences", figure)
        if not arguments.without_peers and num_sequences in (arguments.peer_sequences or arguments.sequences):
            rates = run_peers(model, arguments, num_sequences)
            peers[str(num_sequences)] = peers.get(str(num_sequences), {}) | rates
            for name, rate in rates.items():
                print(f"{name + f', {num_sequences} sequences':<44}{rate:>12,.0f}", flush=True)
        report(arguments, ceilings, figures, peers, {})  # an interrupted run keeps its measurements
    agents = {str(count): measure_agents(model, arguments, num_agents=count) for count in arguments.agents}
    for count, result in agents.items():
        cost = f"{result['cpu_us_per_call']:,.0f} us of CPU per call"
        print(f"{f'agents, {count}':<44}{result['tokens_per_s']:>12,.0f}  {cost}")
    print(f"ceilings: {ceilings.flops_per_s / 1e12:.1f} TFLOP/s, {ceilings.bytes_per_s / 1e12:.3f} TB/s")
    report(arguments, ceilings, figures, peers, agents)


def with_logprobs(rates: dict[str, float]) -> dict[str, float]:
    """The peers that compute logprobs too, as rollouts need them."""
    return {name: rate for name, rate in rates.items() if not name.endswith("logprobs none")}


def report(
    arguments: argparse.Namespace,
    ceilings: Ceilings,
    figures: dict[str, Figure],
    peers: dict[str, dict[str, float]],
    agents: dict[str, Any],
) -> None:
    """Print and write the results so far."""
    first = f"engine {arguments.sequences[0]}" if arguments.sequences else None
    publish(
        name=f"rollout_{Path(arguments.model).name if arguments.model else arguments.shape}",
        unit="sampled tokens a second",
        ours=figures[first].tokens_per_s if first else next(iter(agents.values()))["tokens_per_s"],
        peers=with_logprobs(peers.get(str(arguments.sequences[0]), {})) if first else {},
        device=arguments.device,
        details={
            "arguments": {
                key: value for key, value in vars(arguments).items() if key not in ("out", "model", "questions")
            },
            "figures": {name: dataclasses.asdict(figure) | {"share": figure.share} for name, figure in figures.items()},
            "peers": peers,
            "agents": agents,
            "ceilings": dataclasses.asdict(ceilings),
        },
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
