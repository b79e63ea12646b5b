"""Tokens per second of rollouts whose prompts and replies are long and of different lengths, as those of agents.

Four cases with random weights, prompts and reply lengths, all from one seed: `queue` (prompts up to 1k, replies
log-normal up to 2k, more requests than run at once), `reasoning` (prompts around 1k, replies log-normal up to 8k),
`long` (prompts of 4k to 8k, replies up to 4k) and `flat` (prompts of 4k to 8k that share nothing, replies of 1k). The
first three come in groups of 8 that share a prompt. Replies have the length drawn for them. Two floors count only the
bytes that any sampler reads, at the speed of a large copy: the weights once a step, and each live key and value once a
step or, in the shared floor, a group's prompt once a group. With `--vllm`, vLLM gets the same requests first. Both are
measured after a call with short replies, which compiles and captures. With `--limit-s` vLLM has two thirds of the time,
and cases that do not begin in time are left out.

    python -m benchmarks.engine.long_contexts --shape qwen3-0.6b --cases long flat --vllm
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.engine.peer_vllm import run_vllm
from benchmarks.engine.rollout import Ceilings, build_model, measure, measure_ceilings
from benchmarks.shared.report import TimeLimit, add_time_limit, publish
from benchmarks.shared.shapes import SHAPES
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.types import Completion, Sampling

GROUP = 8
WARM_UP_SCALE = 1 / 16
"""Length of replies in the call before the measured ones."""
CACHE_SHARE = 0.9
"""Most of the free memory that the cache takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the requests of a case are drawn."""

    num_requests: int
    num_places: int
    """Requests that run at once."""
    prompt: tuple[int, int]
    """Bounds of a uniform distribution."""
    reply_median: int
    reply_sigma: float
    """Of the log-normal distribution; 0: all replies have the median length."""
    max_reply: int
    group: int = GROUP


CASES = {
    "queue": Case(
        num_requests=1024, num_places=256, prompt=(128, 1024), reply_median=512, reply_sigma=0.8, max_reply=2048
    ),
    "reasoning": Case(
        num_requests=256, num_places=256, prompt=(512, 1536), reply_median=1536, reply_sigma=0.9, max_reply=8192
    ),
    "long": Case(
        num_requests=128, num_places=128, prompt=(4096, 8192), reply_median=1024, reply_sigma=0.8, max_reply=4096
    ),
    "flat": Case(
        num_requests=64, num_places=64, prompt=(4096, 8192), reply_median=1024, reply_sigma=0, max_reply=1024, group=1
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Prompts, of which equal ones are one object, and the length of each reply."""

    prompts: list[list[int]]
    num_new: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new)


def draw_requests(case: Case, vocab_size: int, *, reply_scale: float) -> Requests:
    rng = random.Random(0)
    prompts: list[list[int]] = []
    while len(prompts) < case.num_requests:
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(*case.prompt))]
        prompts += [prompt] * case.group
    median, longest = case.reply_median * reply_scale, case.max_reply * reply_scale
    num_new = [
        max(16, int(min(longest, median * rng.lognormvariate(0, case.reply_sigma)))) for _ in range(case.num_requests)
    ]
    return Requests(prompts=prompts[: case.num_requests], num_new=num_new)


def write_requests(cases: dict[str, Requests], file: Path) -> None:
    """Every case's prompts once, and for each request the index of its prompt and the length of its reply."""
    written = {}
    for name, requests in cases.items():
        prompts = {id(prompt): prompt for prompt in requests.prompts}
        places = {key: index for index, key in enumerate(prompts)}
        pairs = [(places[id(p)], num) for p, num in zip(requests.prompts, requests.num_new, strict=True)]
        written[name] = {"prompts": list(prompts.values()), "requests": pairs}
    file.write_text(json.dumps(written))


def run_vllm_cases(
    shape: str, names: Sequence[str], *, reply_scale: float, repeats: int, limit_s: float
) -> dict[str, Any]:
    """vLLM's figures by case, from a process of its own."""
    size = SHAPES[shape].vocab_size
    cases = {name: draw_requests(CASES[name], size, reply_scale=reply_scale) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        write_requests(cases, file := Path(folder) / "requests.json")
        options = ["--requests", str(file), "--repeats", str(repeats), "--gpu-memory", "0.85"]
        return run_vllm(shape, *options, limit_s=limit_s)


def count_token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * model.dtype.itemsize


def compute_floors(model: PreTrainedModel, ceilings: Ceilings, case: Case, requests: Requests) -> tuple[float, float]:
    """Lower bounds in seconds without and with shared prompts read once: weights, keys and values, and the prefill."""
    config = model.config.get_text_config()
    multiplied = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:
        multiplied -= model.get_input_embeddings().weight.numel()
    cached = count_token_bytes(model)
    num_steps = max(max(requests.num_new), -(-requests.num_tokens // case.num_places))
    prefill_s = 2 * multiplied * sum(len(p) for p in {id(p): p for p in requests.prompts}.values())
    prefill_s /= ceilings.flops_per_s
    own = shared = alone = 0
    longest_reply: dict[int, tuple[int, int]] = {}
    for prompt, num_new in zip(requests.prompts, requests.num_new, strict=True):
        own += num_new * (num_new + 1) // 2
        alone += num_new * len(prompt)
        longest_reply[id(prompt)] = (len(prompt), max(num_new, longest_reply.get(id(prompt), (0, 0))[1]))
    shared = sum(length * num_new for length, num_new in longest_reply.values())
    weights_s = num_steps * multiplied * model.dtype.itemsize / ceilings.bytes_per_s
    return tuple(prefill_s + weights_s + (own + prompts) * cached / ceilings.bytes_per_s for prompts in (alone, shared))


async def generate_all(engine: LocalEngine, requests: Requests, *, scale: float) -> list[Completion]:
    calls = [
        engine.generate(
            prompt, Sampling(max_tokens=max(16, int(num_new * scale)), ignore_eos=True, seed=index), order=(index,)
        )
        for index, (prompt, num_new) in enumerate(zip(requests.prompts, requests.num_new, strict=True))
    ]
    return await asyncio.gather(*calls)


def run_case(
    model: PreTrainedModel, ceilings: Ceilings, case: Case, *, reply_scale: float, repeats: int
) -> dict[str, Any]:
    requests = draw_requests(case, model.config.vocab_size, reply_scale=reply_scale)
    longest = max(len(p) + n for p, n in zip(requests.prompts, requests.num_new, strict=True))
    prompts, slack = {id(prompt): prompt for prompt in requests.prompts}.values(), 128 * case.num_requests
    num_cached = sum(map(len, prompts)) + requests.num_tokens + slack  # nothing is ever preempted
    num_cached = min(num_cached, int(CACHE_SHARE * torch.cuda.mem_get_info()[0] / count_token_bytes(model)))
    settings = EngineSection(max_num_seqs=case.num_places, kv_cache_tokens=num_cached)
    engine = LocalEngine(model, None, settings, max_model_len=longest)

    def run(scale: float = 1.0) -> None:
        engine.pause()
        engine.resume(engine.policy_version + 1)
        run_lockstep(generate_all(engine, requests, scale=scale))

    run(WARM_UP_SCALE)
    engine.compute_stats()
    seconds = measure(run, repeats, "cuda", has_warm_up=False)
    stats = engine.compute_stats()
    floor_s, shared_floor_s = compute_floors(model, ceilings, case, requests)
    median = sorted(seconds)[len(seconds) // 2]
    return {
        "case": dataclasses.asdict(case),
        "num_tokens": requests.num_tokens,
        "seconds": seconds,
        "tokens_per_s": requests.num_tokens / median,
        "floor_s": floor_s,
        "shared_floor_s": shared_floor_s,
        "share": floor_s / median,
        "shared_share": shared_floor_s / median,
        "cache_tokens": num_cached,
        "num_preemptions": stats["engine/num_preemptions"],
        "num_prefill_tokens": stats["engine/num_prefill_tokens"] / repeats,
    }


def main(options: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="random weights of this shape")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="cases to run")
    parser.add_argument("--reply-scale", type=float, default=1.0, help="multiplies the lengths of replies")
    parser.add_argument("--repeats", type=int, default=1, help="measured repeats")
    add_time_limit(parser)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too, which must be installed")
    parser.add_argument("--out", help="JSON file for the result, results/engine/NAME.json")
    arguments = parser.parse_args(options)
    scale, repeats, limit = arguments.reply_scale, arguments.repeats, TimeLimit(arguments.limit_s)
    peer = {}
    if arguments.vllm:  # first, since it ends with its process and leaves the memory to this one
        peer = run_vllm_cases(
            arguments.shape, arguments.cases, reply_scale=scale, repeats=repeats, limit_s=arguments.limit_s * 2 / 3
        )
    arguments.device, arguments.model = "cuda", None
    model, ceilings = build_model(arguments), measure_ceilings("cuda")
    figures: dict[str, Any] = {}
    for name in arguments.cases:
        if not limit.has_room(name):
            continue
        figure = run_case(model, ceilings, CASES[name], reply_scale=scale, repeats=repeats)
        figures[name] = figure
        gc.collect()
        torch.cuda.empty_cache()
        theirs = peer.get("cases", {}).get(name)
        rate = theirs["tokens_per_s"] if theirs else None
        ratio = f", vLLM {rate:,.0f}, {figure['tokens_per_s'] / rate:.2f} x" if rate else ""
        print(
            f"{name:<12}{figure['tokens_per_s']:>10,.0f} tokens/s{figure['share'] * 100:>6.0f} % of the floor"
            f"{figure['shared_share'] * 100:>6.0f} % of the shared floor{ratio}",
            flush=True,
        )
        report(arguments, figures, peer, ceilings)


def report(arguments: argparse.Namespace, figures: dict[str, Any], peer: dict[str, Any], ceilings: Ceilings) -> None:
    """Print and write the results so far."""
    first = next(iter(figures))
    theirs = peer.get("cases", {}).get(first)
    publish(
        name=f"long_contexts_{arguments.shape}",
        unit=f"sampled tokens a second, {first}",
        ours=figures[first]["tokens_per_s"],
        peers={f"vllm {peer['version']}": theirs["tokens_per_s"]} if theirs else {},
        device="cuda",
        details={
            "reply_scale": arguments.reply_scale,
            "figures": figures,
            "vllm": peer.get("cases"),
            "ceilings": dataclasses.asdict(ceilings),
        },
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
